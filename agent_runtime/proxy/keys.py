"""Keys of sessions, which agents use as API keys. Pure except for random numbers.

A key names its session and has a secret: `sk-<session>.<secret>`. It is a bearer token, or a segment of the path. Only
its SHA-256 is stored. A salt is not needed, because the secret is as long as the digest.
"""

import base64
import hashlib
import hmac
import re
import secrets
from typing import Final

_SECRET_BYTES: Final = 32
_KEY: Final = re.compile(r"sk-(.+)\.[A-Za-z0-9_-]{43}")  # 32 bytes in base64url are 43 characters
_SESSION: Final = re.compile(r"(?!sk-)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

SESSION_FORM: Final = "1 to 128 of letters, digits, `.`, `_` and `-`, beginning with a letter or digit, not with `sk-`"
"""Valid names of sessions: they are segments of URLs and of object keys, and must not look like a key."""


def is_session_id(name: str) -> bool:
    return _SESSION.fullmatch(name) is not None


def new_key(session: str) -> str:
    return key_of(session, secrets.token_bytes(_SECRET_BYTES))


def key_of(session: str, secret: bytes) -> str:
    """Return the key with this secret of 32 bytes, for callers that derive the secret."""
    return f"sk-{session}.{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def session_of(key: str) -> str | None:
    """Return the session that a key names; None if it is not a key."""
    match = _KEY.fullmatch(key)
    return match[1] if match and is_session_id(match[1]) else None


def digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def matches(key: str, stored: str) -> bool:
    """Whether `key` is the key with that digest, in constant time."""
    return hmac.compare_digest(digest(key), stored)

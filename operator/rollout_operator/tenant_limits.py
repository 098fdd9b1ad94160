"""Limits of what the operator keeps in memory for tenants.

All tenants share one process with a fixed amount of memory. Anything of theirs that outlives the call that read it is cut
here.
"""

import hashlib
from typing import Final

MOST_CHARACTERS: Final = 1024
"""Longest message: of an error, an Event, a condition, a fact. API servers, registries and webhooks quote what tenants
wrote, and an API server accepts no longer message in an Event.
"""


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text of at most `most` characters. The middle is left out: the start says what failed, and the end why."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]} … {text[-end:]}"


def digest(*texts: str) -> bytes:
    """Return a key for texts of any length."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).digest()

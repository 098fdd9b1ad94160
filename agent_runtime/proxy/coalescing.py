"""Which request is another one's retry. Pure.

The packages of OpenAI and Anthropic count a request's retries in `x-stainless-retry-count`, and send `Idempotency-Key`
where the caller gave one. A retry gets the answer of its original only

- by an equal idempotency key, also while the original is still waited for; or
- when it says that it is a retry, has the same body, and the original's answer reached nobody.

Equal requests side by side are samples of their own, so a body alone never makes one a retry. Nor does a retry join an
original whose connection still lives, unless by its key.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agent_runtime.proxy.chat import BadRequest
from agent_runtime.proxy.paths import whole_number

RETRY_COUNT: Final = "x-stainless-retry-count"
IDEMPOTENCY_KEY: Final = "idempotency-key"

_LONGEST_KEY: Final = 255  # as in Stripe's API, whose header this is
MOST_KEPT: Final = 64
"""Answers that are kept for a retry; SDKs retry twice, and an agent has a handful of calls under way."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a request from others."""

    digest: str
    """SHA-256 of API and body."""
    key: str | None = None
    is_retry: bool = False

    @classmethod
    def of(cls, api: str, headers: Mapping[str, str], body: bytes) -> "Identity":
        """`headers` have names in lower case. Raises BadRequest."""
        key = headers.get(IDEMPOTENCY_KEY) or None
        if key is not None and len(key) > _LONGEST_KEY:
            raise BadRequest(f"Idempotency-Key: at most {_LONGEST_KEY} characters, got {len(key)}")
        digest = hashlib.sha256(api.encode() + b"\n" + body).hexdigest()
        return cls(digest, key, is_retry=bool(whole_number(headers.get(RETRY_COUNT, "0"))))


class Answers(Generic[T]):
    """The calls of a session that a retry may ask for again."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, tuple[Identity, T]] = OrderedDict()
        self._undelivered: OrderedDict[int, tuple[Identity, T]] = OrderedDict()
        self._number = 0

    def find(self, identity: Identity) -> T | None:
        """The call whose answer this request gets; None when it is one of its own. Raises BadRequest."""
        if identity.key is not None:
            if (known := self._by_key.get(identity.key)) is None:
                return None
            if known[0].digest != identity.digest:
                raise BadRequest("Idempotency-Key: it was used for another request; give each request its own")
            return known[1]
        if not identity.is_retry:
            return None
        equal = (number for number, (other, _) in self._undelivered.items() if other.digest == identity.digest)
        number = next(equal, None)
        return None if number is None else self._undelivered.pop(number)[1]

    def begun(self, identity: Identity, call: T) -> None:
        """A call is under way, or was in an earlier epoch."""
        if identity.key is not None:
            self._by_key[identity.key] = identity, call
            if len(self._by_key) > MOST_KEPT:
                self._by_key.popitem(last=False)

    def failed(self, identity: Identity, call: T) -> None:
        """It has no answer, so that a retry is a new call."""
        if identity.key is not None and (known := self._by_key.get(identity.key)) and known[1] is call:
            del self._by_key[identity.key]

    def undelivered(self, identity: Identity, call: T) -> None:
        """Its answer is recorded and reached nobody."""
        self._number += 1
        self._undelivered[self._number] = identity, call
        if len(self._undelivered) > MOST_KEPT:
            self._undelivered.popitem(last=False)

    def forget(self, call: T) -> None:
        for number, (_, other) in list(self._undelivered.items()):
            if other is call:
                del self._undelivered[number]

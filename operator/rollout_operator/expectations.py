"""The operator's writes that the watches have not delivered yet. A plan from a cache without them would repeat them."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

EXPIRY_SECONDS = 30.0
"""Longest wait for a write. It is longer than a watch takes to reconnect. If it expires too early, a plan repeats the
write and gets status 409, because names are deterministic.
"""

ObjectName = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass
class _Pending:
    versions: dict[ObjectName, int] = field(default_factory=dict)
    expires: float = 0.0


class Expectations(Generic[K]):
    """For each key, the written objects and the resourceVersion at which the watch will show each write.

    Resource versions of one kind grow with every write, in the order in which a watch delivers them.
    """

    def __init__(self) -> None:
        self._pending: dict[K, _Pending] = {}
        self._waiting: dict[ObjectName, set[K]] = {}

    def expect(self, key: K, written: ObjectName, version: int, now: float) -> None:
        """Record a write for `key` that produced that version. Plans for the key wait until the watch shows it."""
        pending = self._pending.setdefault(key, _Pending())
        pending.versions[written] = max(version, pending.versions.get(written, 0))
        pending.expires = now + EXPIRY_SECONDS
        self._waiting.setdefault(written, set()).add(key)

    def saw(self, obj: ObjectName, version: int) -> list[K]:
        """Record that the watch shows an object, or its deletion, at a version. Returns the keys that no longer wait."""
        free = []
        for key in tuple(self._waiting.get(obj, ())):
            pending = self._pending[key]
            if pending.versions[obj] <= version:
                del pending.versions[obj]
                self._drop(obj, key)
                if not pending.versions:
                    del self._pending[key]
                    free.append(key)
        return free

    def hold(self, key: K, now: float) -> float:
        """Return the most seconds that the key's next plan must wait; 0 if it need not."""
        pending = self._pending.get(key)
        if pending is None:
            return 0.0
        if now >= pending.expires:
            self.forget(key)
            return 0.0
        return pending.expires - now

    def forget(self, key: K) -> None:
        pending = self._pending.pop(key, None)
        for obj in pending.versions if pending else ():
            self._drop(obj, key)

    def _drop(self, obj: ObjectName, key: K) -> None:
        waiting = self._waiting[obj]
        waiting.discard(key)
        if not waiting:
            del self._waiting[obj]

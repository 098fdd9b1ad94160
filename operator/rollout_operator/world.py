"""What `observe` functions look at, and the shape of a kind: observe, then plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rollout_operator.actions import Fact, Manifest, Plan, Remember
from rollout_operator.cache import Cache
from rollout_operator.config import OperatorConfig

if TYPE_CHECKING:
    from rollout_operator.model_server.update_state import ServerContact


MOST_FACTS = 10_000
"""A bound against leaks only; what is learned grows with namespaces and nodes, and expires."""


class Memory:
    """Facts with an expiry. Nothing is persisted: a wrong or old fact costs one more try."""

    def __init__(self) -> None:
        self._facts: dict[Fact, tuple[str, float]] = {}

    def learn(self, what: Remember, now: float) -> None:
        """Keep a fact for its seconds; the newest message counts. `now` is in seconds of any one clock."""
        self._facts.pop(what.fact, None)
        self._facts[what.fact] = (what.message, now + what.seconds)
        if len(self._facts) > MOST_FACTS:
            self._facts = {fact: kept for fact, kept in self._facts.items() if kept[1] > now}
        while len(self._facts) > MOST_FACTS:
            del self._facts[next(iter(self._facts))]

    def recall(self, fact: Fact, now: float) -> str | None:
        """The message of a fact that still holds."""
        kept = self._facts.get(fact)
        return kept[0] if kept and now < kept[1] else None


@dataclass(frozen=True)
class World:
    """All that is known at one moment. `observe` takes from it what its kind needs; reading it does no I/O."""

    cache: Cache
    config: OperatorConfig
    now: datetime
    """With time zone UTC."""
    memory: Memory
    keys: dict[str, str]
    """Keys that were read (actions `EnsureKey` and `ReadKey`), by the uid of their Secret's controller."""
    last_error: str | None = None
    """Why the last round about this object failed, in the API server's words; None when it went well."""
    asked: "Mapping[tuple[str, int], ServerContact]" = field(default_factory=dict)
    """What model servers reported (action `Ask`), by uid of their pod and restarts of their engine."""

    def recall(self, fact: Fact) -> str | None:
        """The message of a fact that a plan has learned (action `Remember`) and that still holds."""
        return self.memory.recall(fact, self.now.timestamp())


@dataclass(frozen=True)
class Controller:
    """One kind: how it is observed and planned. Neither does I/O nor keeps anything."""

    kind: str
    observe: Callable[[World, Manifest], Any]
    """(world, the object) -> what the plan needs, frozen."""
    plan: Callable[[Any], Plan]
    needs_spec: Callable[[Any], bool] = lambda seen: False
    """Whether the plan needs the whole spec, of which the cache has a part only (`prune.py`)."""

"""What `observe` functions look at, and the shape of a kind: observe, then plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rollout_operator.actions import Fact, Manifest, Plan
from rollout_operator.cache import Cache
from rollout_operator.config import OperatorConfig
from rollout_operator.memory import Memory

if TYPE_CHECKING:
    from rollout_operator.model_server.operations import Known


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
    asked: "Mapping[tuple[str, int], Known]" = field(default_factory=dict)
    """What model servers said when they were asked (action `Ask`), by uid of their pod and starts of their engine."""

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

"""The kinds that the operator watches, the inputs of `observe` functions, and the interface of a controller: observe,
then plan.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollout_api.cluster import MANAGED_BY, ROLE_LABEL, SANDBOX_ROLE
from rollout_api.on_cluster.objects import Json, Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator.actions import Fact, Plan, Remember
from rollout_operator.cache import Cache
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.server_contact import ServerContact
from rollout_operator.tenant_limits import shortened

MANAGED_SELECTOR = ",".join(f"{label}={value}" for label, value in MANAGED_BY.items())
"""Label selector of the objects that the operator creates, so that the API server sends no other pods."""


OWNED = (
    *("Pod", "Job", "NetworkPolicy", "RolloutShard"),
    *("StatefulSet", "LeaderWorkerSet", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"),
    "InferencePool",
)
WATCHED = {"Sandbox": "", "SandboxPool": "", "RolloutJob": "", "ModelServer": "", "Node": ""} | dict.fromkeys(
    OWNED, MANAGED_SELECTOR
)
"""Kinds in the cache, with the label selector of each watch."""

OPTIONAL = frozenset({"Node", "LeaderWorkerSet", "InferencePool"})
"""Kinds that may be unavailable. An operator limited to some namespaces may lack the right to read cluster-scoped
kinds. LeaderWorkerSet and InferencePool are optional additions that only some servers need.
"""

NOT_SANDBOX: Json = {"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}
"""Label selector requirement that excludes sandboxes and includes pods without the label."""

_BY_ADMISSION = re.compile(
    r'(?:creating \w+ [\w./-]+: )?(?:[\w./-]+ "[^"]*" is forbidden: )?'
    r"(?:violates PodSecurity|unable to validate against any"
    r"|ValidatingAdmissionPolicy '[^']*'(?: with binding '[^']*')? denied request"
    r'|admission webhook "[^"]*" denied the request)'
)
"""The beginning of refusals by Pod Security, OpenShift's constraints, policies and webhooks. The rest of a message may quote
what a tenant wrote.
"""


def is_by_admission(message: str) -> bool:
    """Whether an API server's message says that admission refused an object. Labels and policies may change later."""
    return _BY_ADMISSION.match(message) is not None


OPERATOR_LABELS: Json = {"app.kubernetes.io/name": "agent-rollouts", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods, as set by the chart."""


def operator_peer(config: OperatorConfig) -> Json:
    """Return the peer of NetworkPolicies that is the operator."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.lease.namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }


def tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}


MOST_FACTS = 10_000
"""Most facts, as a guard against leaks. Normally facts expire, and their number depends on namespaces and nodes."""


class Memory:
    """Facts with an expiry. They are not persisted: a wrong or lost fact costs one more attempt."""

    def __init__(self) -> None:
        self._facts: dict[Fact, tuple[str, float]] = {}

    def learn(self, what: Remember, now: float) -> None:
        """Keep a fact for some seconds. The newest message replaces older ones. `now` is in seconds of any one clock."""
        self._facts.pop(what.fact, None)
        self._facts[what.fact] = (shortened(what.message), now + what.seconds)
        if len(self._facts) > MOST_FACTS:
            self._facts = {fact: kept for fact, kept in self._facts.items() if kept[1] > now}
        while len(self._facts) > MOST_FACTS:
            del self._facts[next(iter(self._facts))]

    def recall(self, fact: Fact, now: float) -> str | None:
        """Return the message of an unexpired fact."""
        kept = self._facts.get(fact)
        return kept[0] if kept and now < kept[1] else None


@dataclass(frozen=True)
class World:
    """All inputs at one moment. `observe` reads what its kind needs, without I/O."""

    cache: Cache
    config: OperatorConfig
    now: datetime
    """In UTC."""
    memory: Memory
    keys: dict[str, str]
    """Known keys (actions `EnsureKey` and `ReadKey`), by the uid of their Secret's controller."""
    last_error: str | None = None
    """Error message of this object's last reconciliation; None if it succeeded."""
    asked: Mapping[tuple[str, int], ServerContact] = field(default_factory=dict)
    """Reports of model servers (action `Ask`), by uid of their pod and restarts of their engine."""
    executors: Mapping[str, ExecutorReport] = field(default_factory=dict)
    """Reports of executors (action `AskExecutors`), by the uid of their Sandbox."""

    def recall(self, fact: Fact) -> str | None:
        """Return the message of an unexpired fact (action `Remember`)."""
        return self.memory.recall(fact, self.now.timestamp())


@dataclass(frozen=True)
class Controller:
    """How one kind is observed and planned. Neither function does I/O or keeps state."""

    kind: str
    observe: Callable[[World, Manifest], Any]
    """Returns the immutable inputs of the plan, given the world and the object."""
    plan: Callable[[Any], Plan]
    needs_spec: Callable[[Any], bool] = lambda seen: False
    """Whether the plan needs the whole spec. The cache may have only a part of it (`prune.py`)."""

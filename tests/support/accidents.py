"""Random accidents in a running job and in its cluster."""

import random
import time
from collections.abc import Callable, Mapping, Sequence

from tests.support.cluster import OPERATOR, OPERATOR_NAMESPACE, Cluster, Job, Object, eventually
from tests.support.operators import leader, operator_pods
from tests.support.outages import Outages
from tests.support.runner_pods import is_live, kill_engine, second_runner, shard

FREEZE, THAW = "runner frozen", "runners thawed"
THAWED_AFTER = 3
"""Accidents from freeze to thaw, including the freeze. The other runner needs a few seconds to take over."""
OPERATORS = 2
"""One operator leads, the other is on standby."""
ONLY_HERE = frozenset({"leader killed", "API server away", "storage away"})
"""Accidents that are only possible in the harness's own cluster (hack/cluster)."""


def in_random_order(counts: Mapping[str, int], chance: random.Random) -> list[str]:
    """Return each accident as often as its count says, and a thaw some time after each freeze."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    order: list[str] = []
    thaws: list[int] = []
    for number, kind in enumerate(chance.sample(kinds, len(kinds))):
        order += [THAW] * thaws.count(number)
        order.append(kind)
        thaws += [number + THAWED_AFTER] * (kind == FREEZE)
    return order + [THAW] * any(number >= len(kinds) for number in thaws)


def at_even_distances(kinds: Sequence[str], seconds: float, chance: random.Random) -> list[tuple[float, str]]:
    """Return a random time in a separate interval for each of them."""
    stretch = seconds / max(1, len(kinds))
    return [((number + chance.random()) * stretch, kind) for number, kind in enumerate(kinds)]


class Accidents:
    """Causes accidents, one at a time. `away_seconds`: shortest and longest outage."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        outages: Outages | None,
        away_seconds: tuple[float, float],
        chance: random.Random,
    ) -> None:
        self._cluster, self._job, self._outages, self._chance = cluster, job, outages, chance
        self._away_seconds = away_seconds
        self._frozen: list[Object] = []
        self._successors: list[str] = []
        self._kinds: Mapping[str, Callable[[], str]] = {
            "engine killed": self._kill_engine,
            "runner deleted": lambda: self._delete(self._one(self._runners)),
            "runner evicted": lambda: self._evict(self._one(self._runners)),
            FREEZE: self._freeze,
            THAW: self._thaw,
            "sandbox deleted": lambda: self._delete(self._one(self._sandboxes)),
            "sandbox evicted": lambda: self._evict(self._one(self._sandboxes)),
            "operator deleted": lambda: self._delete(self._one(self._operators)),
            "leader killed": self._kill_leader,
            "no operator": self._no_operator,
            "API server away": self._no_api_server,
            "storage away": lambda: self._without("s3"),
        }

    def happen(self, kind: str) -> str:
        """Cause one accident. Returns its victim, or its duration, for the log."""
        return self._kinds[kind]()

    def clean_up(self) -> None:
        """Delete the pods that took over from frozen runners, because they belong to no Job."""
        for name in self._successors:
            self._cluster.kubectl("delete", "pod", name, "-n", self._job.namespace, "--ignore-not-found")

    def _kill_engine(self) -> str:
        pod = self._one(self._runners)
        kill_engine(self._cluster, pod)
        return _name(pod)

    def _delete(self, pod: Object) -> str:
        """Delete a pod without a grace period."""
        now = ("--grace-period=0", "--force", "--wait=false")
        self._cluster.kubectl("delete", "pod", _name(pod), "-n", pod["metadata"]["namespace"], *now)
        return _name(pod)

    def _evict(self, pod: Object) -> str:
        assert self._cluster.evict(_name(pod), pod["metadata"]["namespace"])
        return _name(pod)

    def _freeze(self) -> str:
        """Freeze a runner, which is then believed dead, and start another one for its shard."""
        pod = self._one(self._runners)
        kill_engine(self._cluster, pod, "STOP")
        self._frozen.append(pod)
        name = f"successor-{len(self._successors)}"
        self._successors.append(name)
        self._cluster.apply(second_runner(pod, name))
        return f"{_name(pod)}, {name} takes over"

    def _thaw(self) -> str:
        for pod in self._frozen:
            kill_engine(self._cluster, pod, "CONT")
        thawed = ", ".join(map(_name, self._frozen))
        self._frozen.clear()
        return thawed

    def _kill_leader(self) -> str:
        assert self._outages is not None
        name = leader(self._cluster)
        pod = self._one(lambda: [pod for pod in self._operators() if _name(pod) == name] or self._operators())
        self._outages.kill(pod)
        return _name(pod)

    def _no_operator(self) -> str:
        scale = ("scale", OPERATOR, "-n", OPERATOR_NAMESPACE)
        self._cluster.kubectl(*scale, "--replicas=0")
        away = self._pause()
        self._cluster.kubectl(*scale, f"--replicas={OPERATORS}")
        return away

    def _no_api_server(self) -> str:
        # The controllers too: after so long without an answer they would ask again only after a minute.
        assert self._outages is not None
        with self._outages.without("controller-manager"):
            return self._without("apiserver")

    def _without(self, component: str) -> str:
        assert self._outages is not None
        with self._outages.without(component):
            return self._pause()

    def _pause(self) -> str:
        seconds = self._chance.uniform(*self._away_seconds)
        time.sleep(seconds)
        return f"for {seconds:.0f} s"

    def _one(self, pods: Callable[[], Sequence[Object]]) -> Object:
        """Return one of them at random. If all were just killed, wait for their successors."""
        return self._chance.choice(eventually(lambda: pods() or None, 120, self._job.describe))

    def _runners(self) -> list[Object]:
        """Return the runners of the Job, without frozen ones and their successors."""
        frozen = {_name(pod) for pod in self._frozen}
        pods = [pod for pod in self._job.pods("runner") if is_live(pod) and shard(pod) is not None]
        return [pod for pod in pods if _name(pod) not in frozen]

    def _sandboxes(self) -> list[Object]:
        return [pod for pod in self._job.pods("sandbox") if is_live(pod)]

    def _operators(self) -> list[Object]:
        return [pod for pod in operator_pods(self._cluster) if is_live(pod)]


def _name(pod: Object) -> str:
    name: str = pod["metadata"]["name"]
    return name

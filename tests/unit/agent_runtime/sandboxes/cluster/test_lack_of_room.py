"""How long requests wait for room, and how seldom the API server is asked whether others use it."""

from typing import Any, cast

import pytest

from agent_runtime.kube.api import ApiError, KubeApi
from agent_runtime.sandboxes.cluster import lack_of_room
from agent_runtime.sandboxes.cluster.lack_of_room import UseOfRoom, is_lack_of_room, seconds_left
from agent_runtime.sandboxes.cluster.sandbox_object import POD_IP

NEVER = float("inf")


@pytest.mark.parametrize(
    ("message", "is_lack"),
    [
        ('pods "s" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4', True),
        ("exceeded quota: q, requested: limits.memory=1Gi,pods=1, used: limits.memory=0,pods=4, limited: pods=4", True),
        (
            "exceeded quota: q, requested: limits.memory=1Gi,pods=1, used: pods=4, limited: limits.memory=2Gi,pods=4",
            True,
        ),
        ("exceeded quota: q, requested: limits.memory=3Gi, used: limits.memory=0, limited: limits.memory=2Gi", False),
        ("exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0; no room", False),
        ("exceeded quota: q, requested: memory=1E, used: memory=0, limi…", True),
        ("exceeded quota: q, requested: memory=1e9, used: memory=0, limited: memory=1x", True),
        ("0/3 nodes are available: 1 Insufficient memory, 2 node(s) had untolerated taint {a: b}.", True),
        ("0/1 nodes are available: 1 Too many pods.", True),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", False),
        ("pull access denied, repository does not exist: insufficient_scope: authorization failed", False),
        ('pods "s" is forbidden: violates PodSecurity "restricted:latest"', False),
        ("", False),
    ],
)
def test_only_quotas_and_full_nodes_are_a_lack_of_room(message: str, is_lack: bool) -> None:
    assert is_lack_of_room(message) is is_lack


@pytest.mark.parametrize(
    ("waited", "unused", "left"),
    [(0.0, NEVER, 600.0), (600.0, NEVER, 0.0), (9000.0, 1.0, 599.0), (9000.0, 600.0, 0.0), (NEVER, NEVER, -NEVER)],
)
def test_request_waits_for_start_seconds_after_others_used_the_room(waited: float, unused: float, left: float) -> None:
    assert seconds_left(600.0, waited=waited, unused=unused) == left


def sandbox(*, is_ready: bool) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(is_ready), "reason": "Any"}]
    return {"metadata": {"name": "s", "uid": "u"}, "spec": {}, "status": {"conditions": conditions, POD_IP: "10.0.0.7"}}


class Pages:
    """An API server that answers with these pages, and then fails."""

    def __init__(self, *pages: list[dict[str, Any]]) -> None:
        self.pages, self.asked = pages, 0

    async def call(self, method: str, path: str, query: Any, **arguments: Any) -> dict[str, Any]:
        self.asked += 1
        if self.asked > len(self.pages):
            raise ApiError(503, "ServiceUnavailable", "no answer")
        more = self.asked < len(self.pages)
        return {"items": self.pages[self.asked - 1], "metadata": {"continue": f"c{self.asked}" if more else ""}}


def reading(pages: Pages) -> UseOfRoom:
    api = KubeApi.__new__(KubeApi)
    cast("Any", api)._call = pages.call
    return UseOfRoom(api)


async def test_use_of_room_reads_pages_until_a_ready_sandbox_is_found() -> None:
    pages = Pages([sandbox(is_ready=False)], [sandbox(is_ready=True)], [])
    assert await reading(pages).read()
    assert pages.asked == 2
    assert not await reading(Pages([], [sandbox(is_ready=False)])).read()


async def test_use_of_room_is_read_once_for_all_requests_and_kept_during_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages([sandbox(is_ready=True)])
    use = reading(pages)
    assert [await use.read() for _ in range(50)] == [True] * 50
    assert pages.asked == 1
    monkeypatch.setattr(lack_of_room, "LOOK_SECONDS", 0.0)
    assert await use.read()
    assert pages.asked == 2

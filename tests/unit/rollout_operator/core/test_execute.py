"""Whether a status must be written, and what an answer of the API server means."""

import asyncio
import base64
from typing import Any, cast

import pytest

from rollout_api.cluster import KEY_FILE
from rollout_operator.api import _CONFLICTING_WRITE, UNREACHABLE, ApiError, KubeApi
from rollout_operator.execute import differs, is_reportable
from rollout_operator.keys import KeyRing, check_owner
from rollout_operator.tenant_limits import MOST_CHARACTERS
from tests.support.memory_api import MemoryApi

READY = {"type": "Ready", "status": "True", "reason": "Up"}
KEY = "0123456789abcdef" * 4
DONE = {"type": "Finished", "status": "False", "reason": "Running"}


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        ({"podName": "p"}, {"podName": "p"}, False),
        ({"podName": "p"}, {}, True),
        ({"podName": "p"}, {"podName": "p", "mode": "Plain"}, True),
        ({"conditions": [READY, DONE]}, {"conditions": [DONE, READY]}, False),
        ({"conditions": [READY]}, {"conditions": [READY | {"status": "False"}]}, True),
        ({"meanReward": 1}, {"meanReward": 1.0}, False),
    ],
)
def test_a_status_is_written_when_the_operators_part_differs_and_only_then(
    wanted: dict[str, Any], found: dict[str, Any], expected: bool
) -> None:
    assert differs(wanted, found) == expected


async def test_a_status_is_written_only_over_the_version_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may deliver the write of a replica that lost the lease long after another one has written."""
    sent: list[dict[str, Any]] = []

    async def write(self: KubeApi, *where: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        sent.append(body)
        return body

    monkeypatch.setattr(KubeApi, "_write", write)
    server = {"metadata": {"namespace": "lab", "name": "qwen", "uid": "u", "resourceVersion": "7"}}
    await KubeApi(lambda: None).apply_status(server, "ModelServer", {"policy": {}}, "operator")  # type: ignore[arg-type,return-value]
    assert sent[0]["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize(
    ("status", "message", "refused"),
    [
        (403, 'pods "s" is forbidden: violates PodSecurity "baseline:latest": hostUsers', True),
        (400, "admission webhook denied the request", True),
        (403, 'admission webhook "w" denied the request: no', True),
        (403, "pods \"s\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", True),
        (403, 'pods "s" is forbidden: unable to validate against any security context constraint: []', True),
        (403, 'pods "s" is forbidden: no PriorityClass with name x violates PodSecurity was found', False),
        (403, 'pods "s" is forbidden: no PriorityClass with name : violates PodSecurity "x" was found', False),
        (
            403,
            'pods "s" is forbidden: error looking up service account n/default: serviceaccount "default" not found',
            False,
        ),
        (403, 'pods "s" is forbidden: status unknown for quota: q, resources: pods', False),
        (403, 'pods "s" is forbidden: pod rejected: RuntimeClass "r" not found', False),
        (422, "Pod is invalid: spec.volumes[0]: Required value: must specify a volume type", True),
        (403, 'pods "s" is forbidden: exceeded quota: q, requested: pods=1, used: pods=5, limited: pods=5', False),
        (403, 'pods is forbidden: User "x" cannot create resource "pods" in API group "" in the namespace "n"', False),
        (403, "unable to create new content in namespace n because it is being terminated", False),
        (429, "too many requests", False),
        (500, "etcdserver: request timed out", False),
        (UNREACHABLE, "the API server cannot be reached", False),
    ],
)
def test_temporary_refusal_is_not_remembered(status: int, message: str, refused: bool) -> None:
    assert ApiError(status, message).refused == refused


LARGE = "x" * 61_000
"""A field of a tenant's object, which an API server quotes."""


@pytest.mark.parametrize(
    ("status", "message", "holds"),
    [
        (403, f'pods "s" is forbidden: violates PodSecurity "baseline:latest": {LARGE}', ApiError.refused),
        (403, f'admission webhook "w" denied the request: {LARGE}', ApiError.refused),
        (409, f"{LARGE}; {_CONFLICTING_WRITE}", ApiError.is_overtaken),
        (409, f"Precondition failed: UID in precondition: 1, UID in object meta: 2 {LARGE}", ApiError.of_another_uid),
    ],
)
def test_a_long_error_is_shortened_and_means_the_same(status: int, message: str, holds: property) -> None:
    error = ApiError(status, message)
    assert holds.fget is not None
    assert holds.fget(error)
    assert len(error.message) == len(str(error)) == MOST_CHARACTERS
    wrapped = ApiError(status, f"creating Pod n/s: {error.message}")
    assert holds.fget(wrapped)
    assert len(wrapped.message) == MOST_CHARACTERS


def test_outages_and_throttling_are_not_reported_for_an_object() -> None:
    assert not any(is_reportable(ApiError(status, "m")) for status in (UNREACHABLE, 429, 500, 503))
    assert all(is_reportable(ApiError(status, "m")) for status in (403, 404, 409, 422))


def test_object_of_an_earlier_owner_is_not_adopted() -> None:
    owner = {"kind": "RolloutJob", "name": "j", "uid": "1", "controller": True}
    found = {"metadata": {"namespace": "n", "name": "j-runner", "ownerReferences": [owner]}}
    check_owner(found, "Job", "1")
    with pytest.raises(ApiError, match=r"Job n/j-runner exists already and belongs to RolloutJob j \(uid 1\)"):
        check_owner(found, "Job", "2")
    with pytest.raises(ApiError, match="has no owner"):
        check_owner({"metadata": {"namespace": "n", "name": "x"}}, "Job", "2")


def test_key_of_a_secret_that_exists_is_read_when_a_full_quota_refuses_its_create() -> None:
    api = MemoryApi()
    owner = {"kind": "ModelServer", "name": "m", "uid": "1", "controller": True}
    secret = {"kind": "Secret", "metadata": {"namespace": "n", "name": "m-control", "ownerReferences": [owner]}}
    asyncio.run(KeyRing(cast("KubeApi", api), lambda: KEY).ensure(secret))
    api.refuse = lambda verb, kind, body: (403, "exceeded quota: q, requested: count/secrets=1")
    restarted = KeyRing(cast("KubeApi", api))
    asyncio.run(restarted.ensure(secret))
    assert restarted.known == {"1": KEY}


def test_key_of_what_runs_is_not_replaced_when_its_secret_is_gone() -> None:
    """Pods that run know only the old key, and would refuse the operator and new jobs without a word."""
    api = MemoryApi()
    owner = {"kind": "SandboxPool", "name": "p", "uid": "1", "controller": True}
    secret = {"kind": "Secret", "metadata": {"namespace": "n", "name": "p-pool", "ownerReferences": [owner]}}
    keys = KeyRing(cast("KubeApi", api), lambda: KEY)
    with pytest.raises(ApiError, match=r"Secret n/p-pool is missing; .* Delete the pods"):
        asyncio.run(keys.ensure(secret, remedy="Delete the pods"))
    assert keys.known == {}
    asyncio.run(keys.ensure(secret))
    assert keys.known == {"1": KEY}, "when nothing runs, a new key is made"
    del api.objects["Secret", "n", "p-pool"]
    asyncio.run(keys.ensure(secret, remedy="Delete the pods"))
    assert ("Secret", "n", "p-pool") in api.objects, "a key that is known is stored again"


@pytest.mark.parametrize(
    "stored",
    ["k" * 1_000_000, KEY[:-1], KEY + "\n", KEY.upper(), "é" * 32, "x"],
    ids=["large", "short", "line", "upper-case", "no-ascii", "one-character"],
)
@pytest.mark.parametrize("verb", ["read", "ensure"])
def test_a_secret_that_a_tenant_has_changed_gives_no_key(stored: str, verb: str) -> None:
    api = MemoryApi()
    owner = {"kind": "SandboxPool", "name": "p", "uid": "1", "controller": True}
    secret = {"kind": "Secret", "metadata": {"namespace": "n", "name": "p-pool", "ownerReferences": [owner]}}
    asyncio.run(api.create({**secret, "data": {KEY_FILE: base64.b64encode(stored.encode()).decode()}}))
    keys = KeyRing(cast("KubeApi", api))
    with pytest.raises(ApiError, match=r"Secret n/p-pool: field key .* expected 64 hexadecimal digits") as caught:
        asyncio.run(keys.ensure(secret) if verb == "ensure" else keys.read("n", "p-pool", "1"))
    assert is_reportable(caught.value)
    assert keys.known == {}

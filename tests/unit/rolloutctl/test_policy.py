"""A trainer learns whether its new weights are served, and never waits after a failure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiException

from rolloutctl.policy import PolicyNotServed, ServedPolicy, is_served

Object = dict[str, Any]
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {}}]
contexts: [{name: mine, context: {cluster: here, user: me}}]
current-context: mine
"""


def model_server(
    version: int = 0, current: int = 0, *, gate: str = "Open", ready: bool = True, invalid: int = 0, **policy: Any
) -> Object:
    """Return a ModelServer whose `spec.policy.version` is `version`; Invalid since generation `invalid`."""
    conditions = [
        {"type": "PolicyLoaded", "status": "False", "reason": "FetchFailed", "message": "no such bucket"},
        {
            "type": "Invalid",
            "status": str(bool(invalid)),
            "message": "spec.lora is wrong",
            "observedGeneration": invalid,
        },
    ]
    return {
        "metadata": {"name": "qwen", "generation": 4},
        "spec": {"policy": {"version": version}},
        "status": {
            "policy": {"current": current, "gate": gate, **policy},
            "servers": [{"name": "qwen-0", "ready": ready}],
            "conditions": conditions,
        },
    }


class Api:
    """An API server with these answers in order; the last one is repeated."""

    def __init__(self, *answers: Object | Exception) -> None:
        self._answers = list(answers)
        self.patches: list[tuple[Sequence[str], Object]] = []

    async def get_namespaced_custom_object(self, *where: str) -> Object:
        return self._next()

    async def patch_namespaced_custom_object(self, *where_and_body: Any, _content_type: str) -> Object:
        assert _content_type == "application/merge-patch+json"
        *where, body = where_and_body
        self.patches.append((where, body))
        return self._next()

    def _next(self) -> Object:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutctl.policy.CHECK_SECONDS", 0.001)


async def test_an_update_returns_when_the_version_is_served_and_not_before() -> None:
    steps = [
        model_server(7),
        model_server(7, gate="Shut", target=7),
        model_server(7, 7, gate="Shut"),
        model_server(7, 7, ready=False),
    ]
    api = Api(*steps, model_server(7, 7))
    await ServedPolicy(api, "lab", "qwen").update(7, "s3://bucket/step-7")
    [(where, patch)] = api.patches
    assert where == ["rollout.dev", "v1alpha1", "lab", "modelservers", "qwen"]
    # The previous version's digest is removed.
    assert patch == {"spec": {"policy": {"version": 7, "uri": "s3://bucket/step-7", "digest": None}, "asleep": None}}
    assert not any(is_served(step, 7) for step in steps)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            model_server(7, 6, failed=7, failedBecause="no shard 3"),
            "version 7 failed: no shard 3; give a higher version",
        ),
        (model_server(8, 7), "version 8 was requested in the meantime, instead of 7"),
        (model_server(7, 6, invalid=4), "spec.lora is wrong"),
    ],
)
async def test_policy_that_can_never_be_served_fails_with_the_operators_message(found: Object, words: str) -> None:
    with pytest.raises(PolicyNotServed, match="ModelServer qwen: .*" + words):
        await ServedPolicy(Api(found), "lab", "qwen").update(7)


async def test_update_of_an_adapter_changes_and_waits_for_that_alone() -> None:
    def adapted(current: int, loaded: int, **status: Any) -> Object:
        found = model_server()
        found["spec"]["adapters"] = {"red": {"version": 3}, "blue": {"version": 9}}
        found["status"]["adapters"] = {"red": {"current": current, **status}, "blue": {"current": 9}}
        found["status"]["servers"][0]["adapters"] = {"red": loaded, "blue": 9}
        return found

    api = Api(adapted(2, 2), adapted(2, 2), adapted(3, 2), adapted(3, 3))
    await ServedPolicy(api, "lab", "qwen", adapter="red").update(3, "s3://bucket/3")
    assert [patch for _, patch in api.patches] == [
        {"spec": {"adapters": {"red": {"version": 3, "uri": "s3://bucket/3", "digest": None}}}}
    ]
    assert not is_served(adapted(3, 2), 3, "red")
    with pytest.raises(PolicyNotServed, match="version 3 failed: no rank; give a higher version"):
        await ServedPolicy(Api(adapted(2, 2, failed=3, failedBecause="no rank")), "lab", "qwen", adapter="red").update(
            3
        )
    with pytest.raises(PolicyNotServed, match="version 3 was requested in the meantime, instead of 2"):
        await ServedPolicy(Api(adapted(3, 3)), "lab", "qwen", adapter="red").served(2)


async def test_sleep_returns_when_all_memory_is_released_and_wake_when_calls_go_on() -> None:
    def asleep(step: str | None, spec: bool = True) -> Object:
        found = model_server(7, 7, gate="Open" if step is None else "Shut", step=step)
        found["spec"]["asleep"] = spec
        return found

    api = Api(asleep(None), asleep(None), asleep("Pausing"), asleep("Sleeping"), asleep("Asleep"))
    await ServedPolicy(api, "lab", "qwen").sleep()
    assert [patch for _, patch in api.patches] == [{"spec": {"asleep": True}}]
    api = Api(asleep("Asleep", False), asleep("Waking", False), asleep("Resuming", False), asleep(None, False))
    await ServedPolicy(api, "lab", "qwen").wake()
    assert [patch for _, patch in api.patches] == [{"spec": {"asleep": None}}]


@pytest.mark.parametrize("adapter", [None, "red"])
async def test_wake_continues_with_the_version_before_a_failed_one(adapter: str | None) -> None:
    def failed(step: str | None) -> Object:
        found = model_server(
            8, 7, gate="Open" if step is None else "Shut", step=step, failed=8, failedBecause="no shard"
        )
        found["spec"]["adapters"] = {"red": {"version": 8}}
        found["status"]["adapters"] = {"red": {"current": 7, "failed": 8}}
        found["status"]["servers"][0]["adapters"] = {"red": 7}
        return found

    api = Api(failed("Asleep"), failed("Asleep"), failed("Waking"), failed("Resuming"), failed(None))
    await ServedPolicy(api, "lab", "qwen", adapter=adapter).wake()
    assert await api.get_namespaced_custom_object() == failed(None), "it returned before calls go on"


async def test_servers_that_cannot_sleep_are_reported_at_once() -> None:
    with pytest.raises(PolicyNotServed, match=r"ModelServer qwen: spec\.lora is wrong"):
        await ServedPolicy(Api(model_server(7, 7, invalid=4)), "lab", "qwen").sleep()


def test_condition_of_an_older_spec_is_ignored() -> None:
    assert not is_served(model_server(7, 6, invalid=3, failed=6), 7)


async def test_timeout_message_has_the_progress() -> None:
    with pytest.raises(PolicyNotServed, match=r"not served after 0\.05 s: FetchFailed: no such bucket"):
        await ServedPolicy(Api(model_server(7, 6)), "lab", "qwen", patience_seconds=0.05).update(7, "s3://b/7")


async def test_an_api_server_that_is_away_for_a_moment_ends_no_training() -> None:
    away: list[Object | Exception] = [ApiException(503, "away"), OSError("refused"), ApiException(429, "busy")]
    api = Api(*away, model_server(7), *away, model_server(7, 7))
    await ServedPolicy(api, "lab", "qwen").update(7)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(422, '{"message": "policy.version: cannot decrease"}', "cannot decrease"), (404, "", "404"), (403, "{}", "403")],
)
async def test_refusal_of_the_api_server_is_quoted(status: int, body: str, words: str) -> None:
    error = ApiException(status, "no")
    error.body = body
    with pytest.raises(PolicyNotServed, match=words):
        await ServedPolicy(Api(error), "lab", "qwen").update(7)


@pytest.mark.parametrize("which", [{}, {"server": "a", "job": "b"}])
async def test_one_server_is_named(which: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of server and job"):
        async with ServedPolicy.connect(**which):
            pass


async def test_the_server_of_a_job_is_found_by_the_jobs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    for place in ("config", "config.kube_config", "aio.config", "aio.config.kube_config"):
        monkeypatch.setattr(f"kubernetes.{place}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    async with ServedPolicy.connect(job="train") as policy:
        assert policy.name == "train-model"

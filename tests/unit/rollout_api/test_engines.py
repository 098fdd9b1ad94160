"""What a ModelServer may request of each inference server."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollout_api.inference.description import EngineType
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.model_server import ModelServerSpec

SGLANG = {"type": "SGLang", "image": "sglang", "version": "0.5.23"}


def spec(**changes: Any) -> ModelServerSpec:
    return ModelServerSpec.model_validate({"model": {"name": "m"}, "engine": SGLANG, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weightTransfer": {"mode": "Push", "push": {"hook": "http://trainer"}}},
            "weightTransfer.mode Push is refused: SGLang receives tensors by other requests",
        ),
        (
            {"adapters": {"red": {"version": 0}}, "lora": {"maxRank": 8, "maxAdapters": 2}, "parallelism": {"data": 2}},
            "parallelism.data must be 1 with adapters: SGLang loads them only in one copy of the model",
        ),
        ({"sleep": True, "asleep": True}, "asleep true is refused: SGLang does not survive a repeated request"),
        ({"asleep": True}, "sleep is needed for asleep; set sleep: true"),
        ({"engine": SGLANG | {"version": "0.5.22"}}, "engine.version is 0.5.22, expected 0.5.23 or newer"),
        ({"engine": SGLANG | {"version": "0.5"}}, "engine.version is 0.5, expected 0.5.23 or newer"),
        ({"extraArgs": ["--tp-size=2"]}, "--tp-size=2 is refused: use parallelism.tensor"),
        ({"extraArgs": ["--enable_metrics"]}, "--enable_metrics is refused: the operator sets it"),
    ],
)
def test_fields_that_sglang_does_not_support_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**changes)


def test_flag_of_vllm_is_an_ordinary_flag_for_sglang() -> None:
    assert spec(extraArgs=["--shutdown-timeout=5"]).extra_args == ["--shutdown-timeout=5"]


def test_policy_update_of_sglang_keeps_running_calls() -> None:
    assert spec(policy={"version": 1, "uri": "s3://p/1"}).engine.description is DESCRIPTIONS[EngineType.SGLANG]
    updates = DESCRIPTIONS[EngineType.SGLANG].updates
    assert updates.pause.body == {"mode": "retract"}
    for request in (updates.name_weights("7"), updates.reload("/policies/7", 60)):
        assert request.body is not None
        assert request.body["abort_all_requests"] is False


@pytest.mark.parametrize("engine", EngineType)
def test_every_request_of_an_update_is_open_to_the_operator_and_to_no_runner(engine: EngineType) -> None:
    described = DESCRIPTIONS[engine]
    updates, routes = described.updates, described.routes
    asked = [updates.paused, updates.weights, updates.pause, updates.resume, updates.abort, updates.checksums]
    asked += [updates.name_weights("1"), updates.reload("/policies/1", 60)]
    if updates.sleep is not None:
        asked += [updates.sleep.sleep, updates.sleep.wake, updates.sleep.resume]
    for request in asked:
        route = (request.method, request.path)
        assert route in routes.control
        assert route not in routes.data or request.method == "GET"
    for request in (updates.pause, updates.name_weights("1"), updates.reload("/policies/1", 60)):
        assert (request.method, request.path) in routes.changes
    assert routes.sampling <= routes.data
    assert routes.changes <= routes.control

"""`rolloutctl explain`: fields as a person names them, and what the shell completes."""

import json

import pytest

from rollout_api.crd import definitions
from rolloutctl.commands.explain import complete_field, explain
from rolloutctl.errors import CommandError
from rolloutctl.ui.console import Form


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("groupSize", ["RolloutJob.groupSize", "integer 1…1024, default 1", "Rollouts of each task."]),
        ("spec.tasks.inline[].verifier", ["RolloutJob.tasks.inline.verifier", "commands | pytest | junit", "required"]),
        ("sandbox.env", ["list of mapping", "Name of the variable."]),
        ("sandbox.network.agent", ["text or list", "default None"]),
        ("verifier.mode", ["Separate | Shared"]),
        ("ModelServer.engine", ["ModelServer.engine", "version"]),
        ("ModelServer", ["An inference engine", "replicas"]),
    ],
)
def test_field_is_explained(path: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    explain(path)
    shown = capsys.readouterr().out
    for part in parts:
        assert part in shown


def test_json_is_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    explain("sampling.temperature", Form.JSON)
    assert json.loads(capsys.readouterr().out)["maximum"] == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sandbox.resorces", "has no field 'resorces'; it has image, .* Did you mean 'resources'?"),
        ("groupSize.x", "RolloutJob.groupSize has no field 'x'; it has no fields"),
        ("tools", "has no field 'tools'.* Fields with this or a similar name: RolloutJob.agent.tools"),
        ("promt", "has no field 'promt'.* similar name: RolloutJob.tasks.inline.prompt"),
        ("Rolloutjob", "Did you mean 'RolloutJob'"),
    ],
)
def test_unknown_field_is_named_with_the_known_ones(path: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        explain(path)


def test_every_field_of_every_kind_can_be_explained() -> None:
    kinds = [definition["spec"]["names"]["kind"] for definition in definitions().values()]
    waiting = [path for path in complete_field("") if path not in kinds]
    assert "Sandbox" in complete_field("")
    seen = set()
    while waiting:
        path = waiting.pop()
        explain(path)
        seen.add(path)
        waiting += complete_field(f"{path}.")
    assert len(seen) > 250


def test_shell_completes_the_next_level() -> None:
    assert complete_field("sandbox.res") == ["sandbox.resources"]
    assert "ModelServer.engine" in complete_field("ModelServer.")
    assert complete_field("nothing.") == []

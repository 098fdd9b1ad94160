"""Another system's configuration becomes a manifest, and every key of it is either converted or reported."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.manifest import load_manifest
from rollout_api.rollout_job import RolloutJob
from rolloutctl.commands.convert import convert_file, written
from rolloutctl.convert.base import Conversion, Source, UnusableInput
from rolloutctl.convert.real_work import convert, recognises
from rolloutctl.errors import CommandError

# All keys that Real Work knows (its src/core/config.py), each with a value that is not its default.
WHOLE: dict[str, Any] = {
    "environments": [
        {
            "id": "calculator api",
            "docker_image": "python:3.9-slim",
            "init_commands": ["pip install flask", "mkdir -p tests"],
            "unit_tests": ["python3 -m pytest tests", "test -f app.py"],
            "prompt": "Write app.py.",
            "timeout_config": {"global_timeout": 600, "command_timeout": 30},
            "working_directory": "/tmp/calculator",
            "environment_variables": {"PYTHONPATH": "/tmp/calculator", "WORKERS": 2},
            "copy_folders": ["tests"],
            "max_retries": 5,
        }
    ],
    "llm_config": {
        "model": "gpt-4",
        "api_key": "sk-secret",
        "base_url": "http://127.0.0.1:8000/v1",
        "temperature": 0.2,
        "max_tokens": 100,
        "timeout": 30,
        "enable_caching": False,
        "cache_size": 5,
        "max_context_messages": 20,
        "max_output_length": 500,
        "track_token_usage": False,
        "max_cost_per_episode": 1.5,
        "warn_high_usage": False,
    },
    "rollout_config": {
        "max_parallel_rollouts": 7,
        "save_trajectory_interval": 5,
        "enable_plugins": True,
        "trajectory_output_path": "results",
        "state_persistence_enabled": False,
    },
    "timeout_config": {"global_timeout": 1800, "command_timeout": 300, "test_timeout": 90},
    "template_prompt": "You are an engineer.",
    "plugins": ["my_plugins.analyzer"],
    "episode_control_config": {
        "max_episodes": 3,
        "max_episodes_per_env": 4,
        "stop_on_success": True,
        "min_success_rate": 0.5,
        "safety_limit": 100,
    },
}

USED = {
    "environments[0].docker_image", "environments[0].init_commands", "environments[0].unit_tests", "environments[0].prompt",
    "environments[0].timeout_config.global_timeout", "environments[0].timeout_config.command_timeout",
    "environments[0].working_directory", "environments[0].environment_variables", "llm_config.model", "llm_config.base_url",
    "llm_config.temperature", "llm_config.max_tokens", "llm_config.timeout", "rollout_config.max_parallel_rollouts",
    "rollout_config.enable_plugins", "rollout_config.trajectory_output_path",
    "rollout_config.state_persistence_enabled", "timeout_config", "template_prompt",
    "episode_control_config.max_episodes", "episode_control_config.max_episodes_per_env",
    "episode_control_config.safety_limit",
}  # fmt: skip
"""Keys that are converted without a remark."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a configuration, with the tests that it copies."""
    made = tmp_path_factory.mktemp("calculator")
    (made / "tests").mkdir()
    (made / "tests" / "test_app.py").write_text("def test(): pass\n")
    (made / "tests" / "data.bin").write_bytes(b"\xff\x00")
    return made


def converted(folder: Path, values: dict[str, Any]) -> tuple[RolloutJob, Conversion]:
    conversion = convert(Source(folder / "config.json", values))
    return load_manifest(written(conversion.manifest)), conversion


def keys_of(values: dict[str, Any], path: str = "") -> set[str]:
    """Return the innermost keys of Real Work's models, as notes name them."""
    found: set[str] = set()
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if (isinstance(value, dict) and name not in ("environment_variables", "timeout_config")) or (
            name == "timeout_config" and path
        ):
            found |= keys_of(value, where)
        elif name == "environments":
            found |= keys_of(value[0], f"{where}[0]")
        else:
            found.add(where)
    return found


def test_every_key_of_theirs_is_either_in_the_manifest_or_reported(folder: Path) -> None:
    _, conversion = converted(folder, WHOLE)
    reported = {note.key for note in conversion.notes if note.key}
    assert reported | USED == keys_of(WHOLE)
    assert not reported & USED
    assert any("network" in note.message and "Public" in note.message for note in conversion.notes)


def test_unknown_key_is_reported_at_every_level(folder: Path) -> None:
    values = copy.deepcopy(WHOLE)
    places = {"": values, "environments[0].": values["environments"][0], "llm_config.": values["llm_config"]}
    places |= {f"{name}.": values[name] for name in ("rollout_config", "episode_control_config")}
    places["environments[0].timeout_config."] = values["environments"][0]["timeout_config"]
    for place in places.values():
        place["colour"] = "red"
    _, conversion = converted(folder, values)
    assert {note.key for note in conversion.notes} >= {f"{place}colour" for place in places}


def test_manifest_has_the_settings_of_the_configuration(folder: Path) -> None:
    job, _ = converted(folder, WHOLE)
    spec = job.spec
    (task,) = spec.tasks.inline or []
    assert (job.metadata.name.startswith("calculator"), spec.mode.value, spec.group_size) == (True, "Eval", 4)
    assert (task.name, task.prompt, task.setup) == (
        "calculator-api",
        "Write app.py.",
        ["pip install flask", "mkdir -p tests"],
    )
    assert task.verifier is not None
    assert task.verifier.commands == ["python3 -m pytest tests", "test -f app.py"]
    assert {file.path: file.data() for file in task.files} == {
        "tests/data.bin": b"\xff\x00",
        "tests/test_app.py": b"def test(): pass\n",
    }
    limits = task.timeouts
    assert (limits.agent_seconds, limits.command_seconds) == (600, 30), "an environment's own limits count"
    assert (limits.setup_seconds, limits.verifier_seconds) == (60, 240), "theirs are for each command"
    assert task.sandbox.image == "python:3.9-slim"
    assert task.sandbox.working_dir == "/tmp/calculator"
    assert {variable.name: variable.value for variable in task.sandbox.env} == {
        "PYTHONPATH": "/tmp/calculator",
        "WORKERS": "2",
    }
    assert spec.sandbox.network.setup == "Public"
    assert spec.sandbox.network.agent == "None"
    assert spec.agent.tools == ["commands-and-files"]
    assert (spec.agent.system_prompt, spec.agent.max_turns) == ("You are an engineer.", 100)
    assert spec.model is not None
    assert spec.model.endpoint is not None
    assert (spec.model.endpoint.base_url, spec.model.endpoint.name) == ("http://127.0.0.1:8000/v1", "gpt-4")
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0.2, 100)
    assert spec.runners.concurrency == 7
    assert spec.output.uri == "results"
    names = ["PerformanceStop", "TrajectoryAnalysis", "SafetyFilter", "RealWork"]
    assert [plugin.name for plugin in spec.plugins] == names
    assert spec.plugins[3].config == {"modules": ["my_plugins.analyzer"]}
    assert (task.verifier.user, spec.sandbox.snapshot_every_turns) == ("1000:1000", None)
    assert spec.plugins[0].config == {"threshold": 1, "minEpisodes": 1, "maxEpisodes": 4}


def test_a_key_for_the_model_never_gets_into_the_manifest(folder: Path) -> None:
    _, conversion = converted(folder, WHOLE)
    assert "sk-secret" not in written(conversion.manifest)
    assert not any("sk-secret" in str(note) for note in conversion.notes)


def test_missing_keys_have_the_defaults_of_the_converted_format(folder: Path) -> None:
    environment = {"id": "e", "docker_image": "i", "unit_tests": ["true"], "prompt": "p"}
    job, conversion = converted(folder, {"environments": [environment], "rollout_config": {}, "template_prompt": ""})
    (task,) = job.spec.tasks.inline or []
    assert (task.timeouts.agent_seconds, task.timeouts.command_seconds, task.timeouts.verifier_seconds) == (
        3600,
        300,
        120,
    )
    assert job.spec.model is not None
    assert job.spec.model.endpoint is not None
    assert job.spec.model.endpoint.name == "anthropic/claude-4-sonnet"
    assert job.spec.model.endpoint.api_key_from is not None
    assert job.spec.model.endpoint.api_key_from.env == "OPENROUTER_API_KEY"
    assert "llm_config" in {note.key for note in conversion.notes}
    assert (job.spec.group_size, job.spec.output.uri) == (1, "trajectories")
    assert job.spec.sandbox.snapshot_every_turns == 5, "state_persistence_enabled is true"


def test_model_options_of_the_converted_command_override_the_file(folder: Path) -> None:
    options = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "temperature": 1.0, "max_tokens": 9, "timeout": 5}
    conversion = convert(Source(folder / "config.json", WHOLE, llm=options))
    spec = load_manifest(written(conversion.manifest)).spec
    assert spec.model is not None
    assert spec.model.endpoint is not None
    assert (spec.model.endpoint.name, spec.model.endpoint.call_seconds) == ("m", 5)
    assert (spec.sampling.temperature, spec.sampling.max_tokens) == (1.0, 9)


def test_converted_job_has_no_plugins_when_they_are_disabled(folder: Path) -> None:
    values = copy.deepcopy(WHOLE)
    values["rollout_config"]["enable_plugins"] = False
    values["episode_control_config"]["stop_on_success"] = False
    assert values["plugins"]
    job, conversion = converted(folder, values)
    assert job.spec.plugins == []
    assert "plugins: are not loaded, because rollout_config.enable_plugins is false" in map(str, conversion.notes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_other_file_is_not_recognised_by_accident(value: Any) -> None:
    assert not recognises(value if isinstance(value, dict) else {"environments": value})


PLACES = [
    (),
    ("environments", 0),
    ("environments", 0, "timeout_config"),
    *((name,) for name in WHOLE if name != "plugins"),
]


@given(st.sampled_from(PLACES), st.data())
def test_any_value_of_a_key_is_converted_or_refused_by_name(folder: Path, place: Any, data: st.DataObject) -> None:
    values = copy.deepcopy(WHOLE)
    inner: Any = values
    for part in place:
        inner = inner[part]
    if isinstance(inner, dict):
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
    with contextlib.suppress(UnusableInput):
        convert(Source(folder / "config.json", values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"copy_folders": ["nowhere"]}, "environments[0].copy_folders: folder nowhere"),
        ({"id": None}, "environments[0].id: is missing"),
        ({"init_commands": "make"}, "environments[0].init_commands: is 'make', expected a list"),
        ({"timeout_config": 5}, "environments[0].timeout_config: is 5, expected a mapping"),
    ],
)
def test_value_that_cannot_be_converted_is_named_with_its_key(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    values = copy.deepcopy(WHOLE)
    values["environments"][0] |= {"copy_folders": []} | change
    path.write_text(json.dumps(values))
    with pytest.raises(CommandError) as error:
        convert_file(path)
    assert words in error.value.message


def test_file_of_an_unknown_system_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(CommandError, match="one of Real Work"):
        convert_file(path)
    path.write_text("[")
    with pytest.raises(CommandError, match="neither JSON nor YAML"):
        convert_file(path)


def test_eval_option_is_refused_for_a_configuration_of_one_job(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(WHOLE))
    with pytest.raises(CommandError, match="describes one job; leave out --eval"):
        convert_file(folder / "config.json", evaluation=True)

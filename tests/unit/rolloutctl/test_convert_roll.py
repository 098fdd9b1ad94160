from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.engine.run import run_job
from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.manifest import load_manifest
from rolloutctl.commands.convert import convert_file, written
from rolloutctl.errors import CommandError

# In the form of ROLL's examples/config/traj_envs.yaml and of the files that name it.
SHARED = r"""
action_pattern: <answer>(.*?)</answer>
think_pattern: <think>(.*?)</think>\s*<answer>(.*?)</answer>
longest: 128
steps: 6
manager: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
system: You play.
template: |
  Turn {turn_idx}: {observation} ({actions_left} left, {max_response_length} tokens) {{x}}
custom_env:
  Lake:
    env_type: frozen_lake
    max_steps: ${steps}
    max_tokens_per_step: ${longest}
    env_manager_cls: ${manager}
    use_thread_lock: true
    agent_system_template: ${system}
    agent_template: ${template}
    env_config: {action_pattern: "${action_pattern}", max_steps: "${steps}", format_penalty: -0.25, is_slippery: false}
  Boxes:
    env_type: sokoban
    max_steps: 4
    agent_system_template: ${system}
    agent_template: ${template}
    env_config: {dim_room: [6, 6], num_boxes: 1, grid_lookup: {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}}
  Shop: {env_type: webshop, max_steps: 3, agent_system_template: "", agent_template: "{observation}"}
"""
OWN: dict[str, Any] = {
    "defaults": ["shared@_here_"],
    "hydra": {"run": {"dir": "."}},
    "exp_name": "My Run",
    "seed": 7,
    "longest": 64,
    "pretrain": "some/model",
    "ppo_epochs": 1,
    "actor_infer": {"strategy_args": {"strategy_name": "vllm"}},
    "reward_normalization": {"grouping": "tags", "method": "mean_std"},
    "reward_clip": 5,
    "train_env_manager": {
        "num_env_groups": 3,
        "group_size": 2,
        "group_size_redundancy": 1,
        "tags": ["Lake", "Boxes", "Shop"],
        "num_groups_partition": [1, 1, 1],
        "generating_args": {"max_new_tokens": 100, "temperature": 0.9, "top_p": 0.8, "top_k": 50},
    },
    "val_env_manager": {"num_env_groups": 1, "tags": ["Lake"], "num_groups_partition": [1]},
    "custom_envs": {name: f"${{custom_env.{name}}}" for name in ("Lake", "Boxes", "Shop")},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "shared.yaml").write_text(SHARED)
    return tmp_path / "roll.yaml"


def converted(
    path: Path, evaluation: bool = False, overrides: Sequence[str] = (), **changes: Any
) -> tuple[dict[str, Any], str]:
    path.write_text(yaml.safe_dump({key: value for key, value in (OWN | changes).items() if value is not None}))
    converter, conversion = convert_file(path, evaluation=evaluation, overrides=overrides)
    assert converter.system == "ROLL"
    return conversion.manifest["spec"], "\n".join(map(str, conversion.notes))


def test_groups_sizes_tags_and_templates_are_carried_over(path: Path) -> None:
    spec, _ = converted(path)
    assert (spec["mode"], spec["groupSize"]) == ("Train", 3)
    assert spec["completion"] == {"minCompletedPerGroup": 2, "cancelStragglers": True}
    lake, boxes = spec["tasks"]["environments"]
    assert lake == {
        "id": "FrozenLake",
        "tag": "Lake",
        "groups": 1,
        "seed": 7,
        "maxSteps": 6,
        "formatPenalty": -0.25,
        "config": {"is_slippery": False},
        "prompt": "Turn {turn}: {observation} ({actionsLeft} left, 64 tokens) {x}\n",
    }
    assert (boxes["id"], boxes["maxSteps"], boxes["config"]["grid_lookup"]["6"]) == ("Sokoban", 4, "@")
    assert spec["reward"] == {"groupBy": "Tag", "method": "MeanStd", "clip": 5}
    assert spec["sampling"] == {"maxTokens": 64, "temperature": 0.9, "topP": 0.8, "extra": {"top_k": 50}}
    assert (spec["agent"]["systemPrompt"], spec["agent"]["maxTurns"]) == ("You play.", 6)


def test_no_key_without_a_counterpart_is_passed_over_in_silence(path: Path) -> None:
    _, notes = converted(path)
    for key in ("ppo_epochs", "actor_infer.strategy_args", "val_env_manager", "custom_envs.Lake.use_thread_lock"):
        assert f"{key}: " in notes
    assert "custom_envs.Shop: env_type webshop is not supported" in notes


@pytest.mark.parametrize("changes", [{"train_env_manager": None}, {"evaluation": True}], ids=["alone", "with --eval"])
def test_evaluation_part_of_a_file_is_converted_to_a_separate_job(path: Path, changes: dict[str, Any]) -> None:
    spec, _ = converted(path, **changes)
    assert (spec["mode"], spec["groupSize"], len(spec["tasks"]["environments"])) == ("Eval", 1, 1)


def test_the_two_jobs_of_a_file_do_not_share_their_results(path: Path) -> None:
    converted(path)
    names = [convert_file(path, evaluation=evaluation)[1].manifest["metadata"]["name"] for evaluation in (False, True)]
    assert names == ["my-run", "my-run-eval"]


def test_jobs_of_long_names_do_not_share_their_results(path: Path) -> None:
    names = set()
    for name in ("x" * 60, "x" * 61):
        converted(path, exp_name=name)
        names |= {
            convert_file(path, evaluation=evaluation)[1].manifest["metadata"]["name"] for evaluation in (False, True)
        }
    assert [len(name) for name in names] == [52] * 4
    assert sum(name.endswith("-eval") for name in names) == 2


@pytest.mark.parametrize(("evaluation", "other"), [(False, "val_env_manager"), (True, "train_env_manager")])
def test_file_with_two_jobs_names_the_option_for_the_other(path: Path, evaluation: bool, other: str) -> None:
    _, notes = converted(path, evaluation=evaluation)
    [note] = [line for line in notes.splitlines() if line.startswith(f"{other}: ")]
    assert note.endswith(f"is a separate job: rolloutctl convert {'without' if evaluation else 'with'} --eval makes it")


async def test_converted_configuration_runs(path: Path) -> None:
    spec, _ = converted(path, output_dir=str(path.parent / "out"), train_env_manager=None)
    _, conversion = convert_file(path)
    job = load_manifest(written(conversion.manifest))
    seen: list[str] = []

    async def answer(messages: list[dict[str, Any]]) -> str:
        seen.extend(message["content"] for message in messages)
        return "<answer>nowhere</answer>"

    await run_job(job, base_dir=path.parent, environ={}, model=FunctionModel(answer, "test"))
    run = await open_run(Store.open(spec["output"]["uri"], {}), "my-run")
    [result] = run.results()
    assert (result.turns, result.reward) == (6, -1.5)
    assert seen[0] == "You play."
    assert any(text.endswith("(5 left, 64 tokens) {x}\n") for text in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"defaults": ["missing@_here_"]}, r"defaults\[0\]: .*missing.yaml cannot be read"),
        (
            {"custom_envs": {"Lake": "${nowhere.Lake}"}},
            r"custom_envs.Lake: refers to \$\{nowhere.Lake\}, which does not exist",
        ),
        ({"steps": "${steps}"}, "references are nested more than 20 levels deep"),
        ({"template": "{history}"}, r"agent_template: \{history\} is not a field of TrajEnvManager's template"),
        ({"action_pattern": "(a+)+(.*?)b"}, "action_pattern: .* is not an answer pattern"),
        ({"custom_envs": {}}, "'Lake' is not in custom_envs"),
        ({"pretrain": None}, "pretrain: is missing"),
        ({"val_env_manager": None, "evaluation": True}, "val_env_manager: is missing, but --eval converts it"),
        ({"overrides": ["seeed=8"]}, r"'seeed=8': the file has no key seeed; add one with \+seeed=8"),
        ({"overrides": ["seed"]}, r"'seed': expected KEY=VALUE, \+KEY=VALUE, \+\+KEY=VALUE or ~KEY"),
        (
            {"overrides": ["train_env_manager.num_env_groups=9"]},
            r"num_groups_partition: the numbers \[1, 1, 1\] add up to 3, and num_env_groups is 9; make them equal",
        ),
        (
            {"overrides": ["+train_env_manager.groups_per_env=9"]},
            "groups_per_env: is not a known key, but its name suggests that it sets the number of rollouts",
        ),
        ({"overrides": ["+train_env_manager.env_groups=3"]}, "env_groups: is an older name of num_env_groups"),
    ],
)
def test_value_that_cannot_be_converted_is_reported_with_its_key(
    path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        converted(path, **changes)


OLDER: dict[str, Any] = {
    "exp_name": "older",
    "pretrain": "some/model",
    "action_sep": "||",
    "max_actions_per_traj": 12,
    "train_env_manager": {"format_penalty": -0.05, "env_groups": 4, "group_size": 8, "tags": ["Boxes"], "n_groups": 4},
    "custom_envs": {
        "Boxes": {
            "env_type": "sokoban",
            "env_instruction": "Push all boxes to targets.",
            "max_tokens": 100,
            "env_config": {"dim_x": 6, "dim_y": 7, "num_boxes": 1, "max_steps": 100},
        }
    },
}


def test_file_of_an_older_roll_keeps_counts_limits_and_rules(path: Path) -> None:
    path.write_text(yaml.safe_dump(OLDER))
    spec = convert_file(path)[1].manifest["spec"]
    [boxes] = spec["tasks"]["environments"]
    assert (boxes["groups"], spec["groupSize"], spec["runners"]["concurrency"]) == (4, 8, 32)
    assert (boxes["maxSteps"], boxes["formatPenalty"]) == (12, -0.05)
    assert boxes["config"] == {"num_boxes": 1, "env_instruction": "Push all boxes to targets.", "dim_room": [6, 7]}
    assert spec["agent"]["config"] == {"actionSeparator": "||"}


def test_overrides_change_values_before_references_are_filled_in(path: Path) -> None:
    overrides = ["steps=3", "train_env_manager.group_size=5", "++reward_clip=2", "~output_dir", "exp_name=other"]
    spec, _ = converted(path, overrides=overrides, output_dir="elsewhere")
    assert (spec["tasks"]["environments"][0]["maxSteps"], spec["groupSize"]) == (3, 6)
    assert (spec["reward"]["clip"], spec["output"]["uri"]) == (2, "output")


def test_key_to_which_others_refer_is_converted_as_if_nothing_referred_to_it(path: Path) -> None:
    # every key that is read, and one that exists only to be referred to
    read = (
        "train_env_manager",
        "reward_normalization",
        "reward_clip",
        "actor_infer",
        "action_sep",
        "max_actions_per_traj",
    )
    values: dict[str, Any] = {"action_sep": "||", "max_actions_per_traj": 4, "only_referred": 1}
    plain, _ = converted(path, **values)
    referring, notes = converted(path, **values, others=[f"${{{key}}}" for key in (*read, "only_referred")])
    assert referring == plain
    assert "only_referred: " not in notes

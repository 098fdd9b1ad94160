"""Convert ROLL's agentic YAML (alibaba/ROLL, `roll/pipeline/agentic/agentic_config.py`) into a manifest.

Terms: an environment group is a task here, an episode is a rollout. A file describes two jobs: the training
(`train_env_manager`) and the evaluation (`val_env_manager`). The evaluation is converted on request, or if it is the only
one. The file is read as by Hydra: its values override those of `defaults`, overrides are applied, `${...}` is replaced.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from agent_runtime.environments.answers import ANSWER, AnswerForm
from rolloutctl.convert.base import Conversion, Converter, Keys, Note, Source, UnusableInput, manifest, read_mapping

DEEPEST = 20
"""Most levels of nested references; circular references never end."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


OVERRIDE = re.compile(r"(~|\+{0,2})([\w.]+)(?:=(.*))?$", re.DOTALL)
"""Hydra's `key=value`, `+key=value`, `++key=value`, `~key`."""


def composed(source: Source, notes: list[Note]) -> tuple[dict[str, Any], set[str]]:
    """Merge the file's values over those of its defaults. Return them, and the top-level keys to which references refer.

    Raises UnusableInput.
    """
    values: dict[str, Any] = {}
    for number, entry in enumerate(source.values.get("defaults", [])):
        where = f"defaults[{number}]"
        name, _, package = str(entry).partition("@")
        if entry == "_self_":
            continue
        if not isinstance(entry, str) or package not in ("", "_here_", "_global_"):
            notes.append(
                Note(where, f"{entry!r} is not read: only files whose values are merged at the top level are supported")
            )
            continue
        path = source.path.parent / f"{name}.yaml"
        try:
            values = _over(values, read_mapping(path))
        except UnusableInput as error:
            raise UnusableInput(f"{where}: {path} {error}") from error
    own = {key: value for key, value in source.values.items() if key not in ("defaults", "hydra")}
    whole = _over(values, own)
    for override in source.overrides:
        _override(whole, override)
    filled = {key: _resolve_references(value, whole, key, 0) for key, value in whole.items()}
    return filled, {name.partition(".")[0] for name in _REFERENCE.findall(str(whole))}


def _override(values: dict[str, Any], override: str) -> None:
    """Change one value as Hydra does: without a plus, the key must exist. Raises UnusableInput."""
    parsed = OVERRIDE.match(override)
    if parsed is None or (parsed[3] is None) != (parsed[1] == "~"):
        raise UnusableInput(f"override {override!r}: expected KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY")
    sign, (*above, name) = parsed[1], parsed[2].split(".")
    place: Any = values
    for part in above:
        if sign.startswith("+") and isinstance(place, dict):
            place.setdefault(part, {})
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict) or (not sign.startswith("+") and name not in place):
        raise UnusableInput(
            f"override {override!r}: the file has no key {parsed[2]}; add one with +{override.lstrip('~')}"
        )
    if sign == "~":
        del place[name]
        return
    try:
        place[name] = yaml.safe_load(parsed[3])
    except yaml.YAMLError as error:
        raise UnusableInput(f"override {override!r}: {parsed[3]!r} is not a YAML value") from error


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _resolve_references(value: Any, whole: Mapping[str, Any], where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise UnusableInput(f"{where}: references are nested more than {DEEPEST} levels deep; they may be circular")
    if isinstance(value, dict):
        return {key: _resolve_references(item, whole, f"{where}.{key}", depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve_references(item, whole, f"{where}[{number}]", depth) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if alone := _REFERENCE.fullmatch(value):
        return _resolve_references(_referenced_value(alone[1], whole, where), whole, where, depth + 1)
    return _REFERENCE.sub(lambda found: str(_resolve_references(found[0], whole, where, depth + 1)), value)


def _referenced_value(name: str, whole: Mapping[str, Any], where: str) -> Any:
    found: Any = whole
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            raise UnusableInput(f"{where}: refers to ${{{name}}}, which does not exist")
        found = found[part]
    return found


ENVIRONMENTS = {"frozen_lake": "FrozenLake", "sokoban": "Sokoban"}
CONFIG = ("grid_lookup", "grid_vocab", "action_lookup", "env_instruction")
OWN_CONFIG = {"FrozenLake": ("size", "p", "is_slippery"), "Sokoban": ("dim_room", "num_boxes", "search_depth")}
WHOLE_CONVERSATION = "traj_env_manager.TrajEnvManager"
GROUPING = {"batch": "Batch", "tags": "Tag", "traj_group_id": "Group"}
METHODS = {"identity": "Identity", "mean": "Mean", "mean_std": "MeanStd", "asym_clip": "AsymClip"}
TRAINING, EVALUATION = "train_env_manager", "val_env_manager"
MOST_AT_ONCE = 100_000
OLDER = {"env_groups", "n_groups"}
"""A manager's keys before ROLL 0.2. That version read `format_penalty` from the manager."""
COUNTS = re.compile("group|traj|episode|env_num|num_env|redundan")
"""Parts of key names that determine the number of rollouts."""
# This project's placeholders for the fields of ROLL's template, except max_response_length, which is a constant.
FIELDS = {"observation": "{observation}", "turn_idx": "{turn}", "actions_left": "{actionsLeft}", "suffix": ""}

_MANAGER_REASONS = {
    "max_env_num_per_worker": "environments share a few processes; runners.concurrency sets how many run concurrently",
    "max_traj_per_env": "a job is one pass over its groups; a trainer submits further ones to tasks.stream",
    "format_penalty": "ROLL does not read it either, but that of the environment's env_config",
    "llm_proxy": "spec.model sets the model",
    "group_filter_cls": "the trainer selects from the results of a group",
}
_ENVIRONMENT_REASONS = {
    "max_tokens": "it is a number of words in ROLL's prompt; sampling.maxTokens limits an answer",
    "max_steps_per_traj": "maxSteps counts the actions",
    "use_thread_lock": "environments run in separate processes",
    "max_env_step_concurrent": "steps of one process run one after another",
    "agent_runner_cls": "agent.type determines the agent",
}
_CONFIG_REASONS = {
    "render_mode": "observations are text",
    "map_seed": "ROLL also draws the map from the group's seed",
    "special_token_list": "an answer is the message's text, which has no special tokens",
    "map_lookup": "only grid_lookup determines the observations",
}
_REASONS = {
    "sequence_length": "the model's server limits the conversation; a longer episode ends with ContextExceeded",
    "rollout_batch_size": "a job has num_env_groups × group_size rollouts",
    "val_batch_size": "a job has num_env_groups × group_size rollouts",
    "track_with": "rolloutctl run --tensorboard or --wandb writes scalars",
    "tracker_kwargs": "rolloutctl run --tensorboard or --wandb writes scalars",
    "render_save_dir": "every observation is recorded, and rolloutctl report shows it",
    "env_monitor": "timeouts.commandSeconds limits a step; an environment that hangs twice is graded by its steps so far",
    "eval_steps": "your trainer runs the job that --eval writes after a number of updates (docs/training-a-policy.md)",
}


def recognises(values: Mapping[str, Any]) -> bool:
    return "custom_envs" in values and bool({TRAINING, EVALUATION} & set(values))


@dataclass(frozen=True)
class Group:
    """An entry of `tasks.environments`, and the settings that a job has only once."""

    tag: str
    entry: dict[str, Any]
    system_prompt: str
    answer_pattern: str
    tokens: int


def convert(source: Source) -> Conversion:
    notes: list[Note] = []
    values, referred = composed(source, notes)
    keys = Keys(values, "", notes)
    if source.llm:
        raise UnusableInput(
            f"--llm-{next(iter(source.llm)).replace('_', '-')}: is an option for Real Work; use KEY=VALUE"
        )
    if source.evaluation and EVALUATION not in keys.values:
        raise UnusableInput(f"{EVALUATION}: is missing, but --eval converts it; leave out --eval")
    trains = TRAINING in keys.values and not source.evaluation
    wanted, other = (TRAINING, EVALUATION) if trains else (EVALUATION, TRAINING)
    if keys.take(other) is not None:
        how = "with --eval" if trains else "without --eval"
        keys.note(other, f"is a separate job: rolloutctl convert {how} makes it")
    manager = keys.below(wanted)
    older = bool(OLDER & set(manager.values))
    penalty = manager.take("format_penalty", 0.0) if older else 0.0
    steps = keys.take("max_actions_per_traj")
    kept = _groups(manager, keys.below("custom_envs"), keys.take("seed", 42), steps, penalty)
    size, redundant = manager.take("group_size", 1), manager.take("group_size_redundancy", 0)
    rollouts = sum(group.entry["groups"] for group in kept) * (size + redundant)
    spec: dict[str, Any] = {
        "mode": "Train" if trains else "Eval",
        "groupSize": size + redundant,
        "tasks": {"environments": [group.entry for group in kept]},
        "model": _model(keys),
        "sampling": _sampling(keys, manager, min(group.tokens for group in kept)),
        "agent": _agent(kept, notes),
        "runners": {"concurrency": min(rollouts, MOST_AT_ONCE)},
        "output": {"uri": keys.take("output_dir", "output")},
    }
    if redundant:
        spec["completion"] = {"minCompletedPerGroup": size, "cancelStragglers": True}
    if reward := _reward(keys.below("reward_normalization"), keys.take("reward_clip", 0.0)):
        spec["reward"] = reward
    if separator := keys.take("action_sep", ""):
        spec["agent"].setdefault("config", {})["actionSeparator"] = separator
    _refuse_unread_counts(manager)
    # The two jobs of a file need different names, because results are found by name.
    name, suffix = keys.take("exp_name", source.path.stem), "-eval" if source.evaluation else ""
    manager.report_rest(_MANAGER_REASONS)
    # An unread key to which others refer needs no note: its value is in the places that refer to it.
    keys.left -= referred
    keys.report_rest(dict.fromkeys(keys.values, "it belongs to the trainer") | _REASONS)
    return Conversion(manifest(name, spec, suffix), [*notes, *_DIFFERENCES])


_DIFFERENCES = (
    Note("", "group g of an environment is reset with seed + g; ROLL draws a seed for each group and increments it with "
         "each further episode"),
    Note("", "prompts describe rules, symbols and actions in this project's words, unless env_instruction and grid_vocab "
         "are set"),
)  # fmt: skip


def _counts(manager: Keys, tags: Sequence[str]) -> list[int]:
    """Return the number of groups of each tag, from current names or those before ROLL 0.2. Raises UnusableInput if
    they disagree.
    """
    total = _take_renamed(manager, "num_env_groups", "env_groups")
    partition = _take_renamed(manager, "num_groups_partition", "n_groups")
    where = manager.where("num_groups_partition")
    counts = partition if isinstance(partition, list) else [total or 128] if partition is None else [partition]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        raise UnusableInput(f"{where}: is {partition!r}; expected a number of groups for each of {tags}")
    if len(counts) != len(tags):
        raise UnusableInput(f"{where}: {counts} has {len(counts)} numbers, expected one for each of {tags}")
    if total is not None and total != sum(counts):
        raise UnusableInput(
            f"{where}: the numbers {counts} add up to {sum(counts)}, and num_env_groups is {total}; make them equal"
        )
    return counts


def _take_renamed(keys: Keys, name: str, before: str) -> Any:
    """Return the value under a key's current or former name. Raises UnusableInput for both."""
    if keys.values.get(name) is not None and keys.values.get(before) is not None:
        raise UnusableInput(f"{keys.where(before)}: is an older name of {name}, which is set too; remove one")
    return keys.take(name) if keys.values.get(name) is not None else keys.take(before)


def _refuse_unread_counts(manager: Keys) -> None:
    """Raise UnusableInput for an unknown key whose name suggests that it determines the number of rollouts."""
    for name in manager.left:
        if name not in _MANAGER_REASONS and COUNTS.search(name):
            raise UnusableInput(
                f"{manager.where(name)}: is not a known key, but its name suggests that it sets the number of rollouts; "
                "correct the name or remove it"
            )


def _groups(manager: Keys, environments: Keys, seed: int, steps: int | None, penalty: float) -> list[Group]:
    tags = manager.take("tags", ["SimpleSokoban"])
    partition = _counts(manager, tags)
    found = []
    for tag, groups in zip(tags, partition, strict=True):
        keys = environments.below(tag)
        if not keys.values:
            raise UnusableInput(f"{manager.where('tags')}: {tag!r} is not in custom_envs")
        kind = keys.require("env_type", str)
        if kind in ENVIRONMENTS:
            found.append(_group(tag, groups, seed, ENVIRONMENTS[kind], keys, steps, penalty))
        else:
            environments.note(tag, f"env_type {kind} is not supported: write a class with Gymnasium's reset and step, and "
                              "add {id: module:Class} to tasks.environments")  # fmt: skip
    if not found:
        raise UnusableInput(f"{manager.where('tags')}: none of {tags} has an env_type of {', '.join(ENVIRONMENTS)}")
    environments.report_rest(dict.fromkeys(environments.values, "no tag of the converted manager refers to it"))
    return found


def _group(tag: str, groups: int, seed: int, environment: str, keys: Keys, steps: int | None, penalty: float) -> Group:
    """Convert one environment. `steps` and `penalty` are the file's defaults."""
    given = keys.below("env_config")
    config = {
        name: _texts(value) for name in (*OWN_CONFIG[environment], *CONFIG) if (value := given.take(name)) is not None
    }
    if (instruction := keys.take("env_instruction")) is not None:
        config.setdefault("env_instruction", instruction)
    if environment == "Sokoban" and {"dim_x", "dim_y"} & set(given.values):
        # SokobanEnvConfig's defaults for the side that is left out.
        config["dim_room"] = [given.take("dim_x", 10), given.take("dim_y", 10)]
    limits = [limit for limit in (_take_renamed(keys, "max_steps", "max_actions_per_traj"), steps) if limit is not None]
    tokens = keys.take("max_tokens_per_step", 128)
    entry = {
        "id": environment,
        "tag": re.sub(r"[^A-Za-z0-9._@+=-]+", "-", tag).strip("-._@+="),
        "groups": groups,
        "seed": seed,
        "maxSteps": min(limits[0] if limits else 20, given.take("max_steps", 20)),
        "formatPenalty": given.take("format_penalty", penalty),
        "config": config,
        "prompt": _prompt(keys.take("agent_template", "{observation}"), tokens, keys),
    }
    if not str(manager_class := keys.take("env_manager_cls", WHOLE_CONVERSATION)).endswith(WHOLE_CONVERSATION):
        keys.note(
            "env_manager_cls",
            f"{str(manager_class).rpartition('.')[2]} is not supported: all turns form one conversation",
        )
    pattern = given.take("action_pattern", ANSWER)
    try:
        AnswerForm.of(pattern)
    except ValueError as error:
        raise UnusableInput(f"{given.where('action_pattern')}: {error}") from error
    system = keys.take("agent_system_template", "")
    given.report_rest(_CONFIG_REASONS)
    keys.report_rest(_ENVIRONMENT_REASONS)
    return Group(tag, entry, system, pattern, tokens)


def _texts(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _prompt(template: str, tokens: int, keys: Keys) -> str:
    """Convert ROLL's prompt template, which is for Python's `format`, to this project's placeholders."""

    def field(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if found[1] == "max_response_length":
            return str(tokens)
        if found[1] not in FIELDS:
            raise UnusableInput(
                f"{keys.where('agent_template')}: {found[0]} is not a field of TrajEnvManager's template, the only "
                f"supported one; its fields are {', '.join(FIELDS)} and max_response_length"
            )
        return FIELDS[found[1]]

    return re.sub(r"\{\{|\}\}|\{(\w+)\}", field, template)


def _agent(groups: list[Group], notes: list[Note]) -> dict[str, Any]:
    """Convert the agent. One agent acts in all environments of a job: if they differ, the first one's settings apply."""
    first = groups[0]
    for group in groups:
        if (group.system_prompt, group.answer_pattern) != (first.system_prompt, first.answer_pattern):
            notes.append(
                Note(
                    f"custom_envs.{group.tag}",
                    f"its agent_system_template or action_pattern differs from that of {first.tag}, which is used, because "
                    "a job has only one. If that matters, convert the tags separately",
                )
            )
    agent: dict[str, Any] = {
        "type": "Environment",
        "tools": [],
        "systemPrompt": first.system_prompt,
        "maxTurns": max(group.entry["maxSteps"] for group in groups),
    }
    return agent if first.answer_pattern == ANSWER else {**agent, "config": {"answerPattern": first.answer_pattern}}


def _model(keys: Keys) -> dict[str, Any]:
    name = keys.require("pretrain", str)
    keys.note("pretrain", f"serve {name} with vLLM at model.endpoint.baseURL, or name a ModelServer instead")
    return {"endpoint": {"baseURL": "http://127.0.0.1:8000/v1", "name": name}}


def _sampling(keys: Keys, manager: Keys, tokens: int) -> dict[str, Any]:
    """Convert the sampling. ROLL uses the arguments of `actor_infer`, if any, for both managers."""
    actor = keys.below("actor_infer")
    own = manager.below("generating_args")
    arguments = actor.below("generating_args") if actor.values.get("generating_args") else own
    limit = arguments.take("max_new_tokens", tokens)
    sampling: dict[str, Any] = {"maxTokens": min(limit, tokens)}
    for theirs, ours in (("temperature", "temperature"), ("top_p", "topP")):
        if (value := arguments.take(theirs)) is not None:
            sampling[ours] = value
    if (top_k := arguments.take("top_k")) is not None:
        sampling["extra"] = {"top_k": top_k}
    arguments.report_rest({"num_return_sequences": "groupSize sets how many rollouts a task has"})
    actor.report_rest(dict.fromkeys(actor.values, "a ModelServer has the settings of the inference engine"))
    return sampling


def _reward(keys: Keys, clip: float) -> dict[str, Any]:
    grouping, method = keys.take("grouping", "batch"), keys.take("method", "identity")
    mean, std = keys.take("norm_mean_type", ""), keys.take("norm_std_type", "")
    if grouping not in GROUPING or method not in METHODS or mean or std:
        keys.note(
            "grouping",
            f"{grouping}, {method}, {mean or '-'} and {std or '-'} are not converted, so the trainer must normalize: a job "
            f"supports grouping {', '.join(GROUPING)} with method {', '.join(METHODS)}",
        )
        return {}
    if method == "asym_clip":
        keys.note("method", "asym_clip limits advantages to -1 to 3, as in ROLL versions before it became mean_std")
    keys.report_rest({})
    reward: dict[str, Any] = {"groupBy": GROUPING[grouping], "method": METHODS[method]}
    return reward | ({"clip": clip} if clip else {})


ROLL = Converter("ROLL", recognises, convert)

"""Convert verl's configuration into the jobs of its rollouts.

`actor_rollout_ref.rollout.custom.agent_rollouts` is a job's spec without the fields that verl determines (tasks, group
size, sampling). Other keys of `custom` belong to other extensions and are not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_runtime.integrations.harbor_server.rows import OWN_KEY, own_settings
from rollout_api.base import API_VERSION, object_name
from rollout_api.manifest import KIND, ManifestError, Problem, load_manifest
from rollout_api.rollout_job import RolloutJob

CUSTOM = f"actor_rollout_ref.rollout.custom.{OWN_KEY}"
DECIDED_BY_VERL = {
    "mode": "whether a batch is for validation",
    "groupSize": "actor_rollout_ref.rollout.n, or a row's __rollout_n__",
    "tasks": "the dataset",
}
SAMPLED_BY_VERL = ("temperature", "topP")
VERLS_CLIENT = {"function": "agent_runtime.integrations.verl.model:LLMClientModel"}
"""Recorded model name if verl's own LLM client answers; the object itself is passed to the session."""
MOST_IN_FLIGHT = 100_000
"""Limit of groups in flight. verl limits them itself by what it submits."""


@dataclass(frozen=True)
class Kind:
    """The properties that all rollouts of a job share."""

    members: int
    validate: bool
    greedy: bool = False
    """Sampled at temperature 0, as REMAX does for its baselines."""
    system_prompt: str | None = None
    """None: the agent's own prompt."""


def rollout_job(config: Mapping[str, Any], kind: Kind) -> RolloutJob:
    """Return the job of a kind. `config` is verl's whole configuration, resolved. Raises ManifestError with all
    problems.
    """
    custom = dict(own_settings(config))
    sampling = dict(custom.pop("sampling", None) or {})
    problems = [
        Problem(f"{CUSTOM}.{field}", f"is determined by {by}; remove it")
        for field, by in DECIDED_BY_VERL.items()
        if custom.pop(field, None) is not None
    ] + [
        Problem(f"{CUSTOM}.sampling.{field}", "is determined by verl's own sampling settings; remove it")
        for field in SAMPLED_BY_VERL
        if sampling.pop(field, None) is not None
    ]
    model = custom.get("model") or {}
    replays = config["actor_rollout_ref"]["rollout"].get("enable_rollout_routing_replay")
    if replays and model and "routedExperts" not in model:
        path = f"{CUSTOM}.model.routedExperts"
        problems.append(Problem(path, "is needed for actor_rollout_ref.rollout.enable_rollout_routing_replay; add it"))
    agent = dict(custom.pop("agent", None) or {})
    if kind.system_prompt is not None:
        agent["systemPrompt"] = kind.system_prompt
    trainer = config["trainer"]
    spec = {
        "output": {"uri": f"{trainer['default_local_dir']}/rollouts"},
        "model": VERLS_CLIENT,
        **custom,
        "agent": agent,
        "mode": "Eval" if kind.validate else "Train",
        "groupSize": kind.members,
        "tasks": {"stream": {"maxInFlight": MOST_IN_FLIGHT}},
        "sampling": {**sampling, **_sampling(config, kind, sampling.get("extra") or {})},
    }
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": object_name(str(trainer["experiment_name"]), "-eval" if kind.validate else "-train", "verl")
        },
        "spec": spec,
    }
    try:
        job = load_manifest(json.dumps(manifest))
    except ManifestError as error:
        problems += [_in_verls_words(problem) for problem in error.problems]
    if problems:
        raise ManifestError(problems, CUSTOM)
    return job


def uses_verls_client(config: Mapping[str, Any]) -> bool:
    """Whether verl's own LLM servers answer; else the model in `custom` does."""
    return not own_settings(config).get("model")


def _sampling(config: Mapping[str, Any], kind: Kind, extra: Mapping[str, Any]) -> dict[str, Any]:
    rollout = config["actor_rollout_ref"]["rollout"]
    values = rollout["val_kwargs"] if kind.validate else rollout
    if kind.greedy:
        values = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return {
        "temperature": values["temperature"],
        "topP": values["top_p"],
        "extra": {"repetition_penalty": 1.0, **extra, "top_k": values["top_k"]},
    }


def _in_verls_words(problem: Problem) -> Problem:
    place = problem.path.removeprefix("spec.")
    return Problem(f"{CUSTOM}.{place}" if place else CUSTOM, problem.message)

"""Convert a requested run into a job, and the job's result into the answer."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from agent_runtime.engine.scheduling.shard import derived_seed
from agent_runtime.extensions import place_and_error
from agent_runtime.integrations.harbor_server.environment import changed_sandbox, read_environment, resources_of
from agent_runtime.integrations.harbor_server.schemas import (
    AgentRequest,
    RolloutDetail,
    RunRequest,
    RunResult,
    RunStatus,
    VerifierRequest,
)
from agent_runtime.recording.job_record import output_uri
from agent_runtime.sandboxes.images.store import place_of
from rollout_api.manifest import explain, validate
from rollout_api.records import Outcome, Record, ResponseRecord, Result, StopReason, Verdict
from rollout_api.rollout_job import AGENTS_WITHOUT_MODEL, RolloutJob
from rollout_api.tasks import Task

PROVIDER_PREFIXES: Final = ("openai/", "hosted_vllm/")
"""LiteLLM's provider prefixes in the model names of Harbor's agents. LiteLLM removes them before it calls the endpoint.
"""
_LONGEST: Final = 604_800


@dataclass(frozen=True)
class SessionUrl:
    """A session at a proxy of the client. Each call at it is a turn that the client records."""

    base_url: str
    name: str
    key: str | None = field(default=None, repr=False)


class RunRefused(ValueError):
    """A requested run that cannot be served; the message names each field."""


@dataclass(frozen=True)
class ServedJob:
    """A manifest with which the server was started."""

    job: RolloutJob
    base_dir: Path
    """The manifest's folder, the base of its relative paths."""


class PlannedRun(BaseModel):
    """A job with `tasks.stream`, and its only task. A run is planned once: until it is resumed, the server may have got
    other manifests and options.
    """

    job: RolloutJob
    base_dir: Path
    manifest: str = ""
    """`metadata.name` of the manifest of which the job was made."""
    task: Task
    model: SessionUrl | None = None
    """The client's own model; None if the server's model is used."""
    warnings: list[str]


def plan_run(run_id: str, request: RunRequest, task: Task, jobs: Mapping[str, ServedJob]) -> PlannedRun:
    """Return the plan of a run. `jobs` are the server's jobs, which `agent.name` selects; without it, the first one.
    Raises RunRefused.
    """
    agent, warnings = request.agent, _unknown(request)
    template_name = _template(agent.name, jobs)
    template, base_dir = jobs[template_name].job, jobs[template_name].base_dir
    spec: dict[str, Any] = template.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kwargs, overrides = dict(agent.kwargs), dict(request.environment_overrides)
    spec["groupSize"] = 1
    spec["output"] = {**spec.get("output", {}), "uri": output_uri(template, base_dir)}
    # The runs of a group are jobs of their own, and must not all draw the same answers.
    spec["seed"] = derived_seed(template.spec.seed, run_id)
    if agent.import_path is not None:
        if template.spec.agent.is_program:
            raise RunRefused(
                f"agent.import_path: the job {template.metadata.name!r} runs its own program; remove the field"
            )
        spec["agent"] = {**spec.get("agent", {}), "type": agent.import_path}
    sampling = {
        wire: kwargs.pop(name) for name, wire in (("temperature", "temperature"), ("top_p", "topP")) if name in kwargs
    }
    spec["sampling"] = {**spec.get("sampling", {}), **sampling}
    url = agent.llm_proxy_url or kwargs.get("model_base_url") or overrides.get("OPENAI_BASE_URL")
    for known in ("model_base_url", "session_id"):
        kwargs.pop(known, None)
    overrides.pop("OPENAI_BASE_URL", None)
    model: SessionUrl | None = None
    key = overrides.pop("OPENAI_API_KEY", None)
    if url and template.spec.agent.type not in AGENTS_WITHOUT_MODEL:
        model = SessionUrl(
            str(url).rstrip("/"), _model_name(agent.model_name, template), None if key is None else str(key)
        )
        endpoint = {"baseURL": model.base_url, "name": model.name}
        # The session's proxy records the tokens.
        spec["model"] = {"endpoint": endpoint, "allowTextOnly": True}
    elif agent.model_name is not None and template.spec.agent.type not in AGENTS_WITHOUT_MODEL:
        warnings.append("agent.model_name is ignored without agent.llm_proxy_url: the server's own model is used")
    if agent.import_path is not None:
        spec["agent"]["config"] = {**spec["agent"].get("config", {}), **kwargs}
    else:
        warnings += [
            f"agent.kwargs.{name} is not supported: job {template_name} configures the agent" for name in kwargs
        ]
    environment = read_environment(request.environment_kwargs, template.spec.sandbox.provider)
    if place_of(image := environment.task.get("image", ""), Path()) is not None:
        raise RunRefused(f"environment_kwargs: {image!r} is a path of the server; name an image of a registry")
    where = f"job {template_name} configures the sandboxes"
    warnings += [f"environment_kwargs.{name} is not supported: {where}" for name in environment.not_honoured]
    own = spec.get("sandbox", {})
    spec["sandbox"] = {**own, **environment.job}
    if "kodo" in environment.job:
        spec["sandbox"]["kodo"] = {**own.get("kodo", {}), **environment.job["kodo"]}
    resources = resources_of(overrides, "override_")
    for name in [name for name in overrides if name.startswith("override_")]:
        warnings.append(f"environment_overrides.{name} is not supported: {overrides.pop(name)!r}")
    changed = _timed(task, request)
    if request.verifier.disable:
        changed["verifier"] = None
        changed["steps"] = [{**step, "verifier": None} for step in changed["steps"]]
    added: dict[str, Any] = {"env": [{"name": name, "value": str(value)} for name, value in overrides.items()]}
    if resources:
        added["resources"] = resources
    changed["sandbox"] = changed_sandbox(changed_sandbox(changed["sandbox"], environment.task), added)
    # Servers may share `output.uri`, and runs with equal keys have equal names at all servers: the uid tells them apart.
    metadata = {"name": run_id, "uid": str(uuid.uuid4())}
    manifest = {"apiVersion": template.api_version, "kind": template.kind, "metadata": metadata, "spec": spec}
    planned, timed = _valid(RolloutJob, manifest, "the job of this run"), _valid(Task, changed, "the task")
    return PlannedRun(
        job=planned, base_dir=base_dir, manifest=template_name, task=timed, model=model, warnings=warnings
    )


def result_of(run_id: str, result: Result, verdict: Verdict | None, records: Sequence[Record], uri: str) -> RunResult:
    """Return the answer for a sealed rollout. A rollout that was lost to infrastructure has no rewards. Only the reward
    named `reward` is included, because clients of PR #83 add up all rewards. A graded rollout has an error if its agent
    failed.
    """
    completed = result.outcome is Outcome.COMPLETED
    error = None if completed else f"{result.reason}: {result.message}"
    if completed and result.stop_reason is StopReason.AGENT_ERROR:
        place = "" if result.traceback is None else f" ({place_and_error(result.traceback)[0]})"
        error = f"{result.stop_reason}: {result.message}{place}"
    return RunResult(
        run_id=run_id,
        status=RunStatus.COMPLETED if completed else RunStatus.FAILED,
        rewards=None if verdict is None or not completed else {"reward": verdict.reward},
        rollout_details=details_of(records) or None,
        error=error,
        result_uri=uri,
    )


def details_of(records: Sequence[Record]) -> list[RolloutDetail]:
    """Return token ids and logprobs by turn; a prompt that does not continue the previous token ids begins another
    conversation.
    """
    details: list[RolloutDetail] = []
    seen: list[int] = []
    for turn in (record for record in records if isinstance(record, ResponseRecord)):
        if turn.prompt_token_ids is None or turn.completion_token_ids is None:
            continue
        prompt = [*seen[: turn.prompt_keep], *turn.prompt_token_ids]
        if not details or turn.prompt_keep < len(seen):
            details.append(RolloutDetail(prompt_token_ids=[], completion_token_ids=[], logprobs=[]))
        detail, seen = details[-1], [*prompt, *turn.completion_token_ids]
        for kept, new in ((detail.prompt_token_ids, prompt), (detail.completion_token_ids, turn.completion_token_ids)):
            assert kept is not None
            kept.append(list(new))
        if detail.logprobs is not None:
            detail.logprobs = None if turn.logprobs is None else [*detail.logprobs, list(turn.logprobs)]
    return details


def _template(name: str | None, jobs: Mapping[str, ServedJob]) -> str:
    if name is None:
        return next(iter(jobs))
    plain = {known.replace("_", "-").lower(): known for known in jobs}
    if (found := plain.get(name.replace("_", "-").lower())) is None:
        raise RunRefused(f"agent.name: {name!r} is not served; the server was started with {', '.join(jobs)}")
    return found


def without_provider(name: str) -> str:
    """Return a model's name at its endpoint, by LiteLLM's rule: `openai/qwen` is `qwen` there."""
    return next((name.removeprefix(prefix) for prefix in PROVIDER_PREFIXES if name.startswith(prefix)), name)


def _model_name(given: str | None, template: RolloutJob) -> str:
    if given is not None:
        return without_provider(given)
    model = template.spec.model
    return model.endpoint.name if model is not None and model.endpoint is not None else "default"


def _timed(task: Task, request: RunRequest) -> dict[str, Any]:
    """Return the task with the run's time limits: override, then the multiplier, and at most the maximum, as in Harbor."""
    wire: dict[str, Any] = task.model_dump(mode="json", by_alias=True)
    by_field: dict[str, AgentRequest | VerifierRequest] = {
        "agentSeconds": request.agent,
        "verifierSeconds": request.verifier,
    }
    for timeout, limits in by_field.items():
        seconds = (limits.override_timeout_sec or wire["timeouts"][timeout]) * request.timeout_multiplier
        wire["timeouts"][timeout] = max(1, round(min(seconds, limits.max_timeout_sec or _LONGEST, _LONGEST)))
    setup = request.agent.override_setup_timeout_sec or wire["timeouts"]["setupSeconds"]
    wire["timeouts"]["setupSeconds"] = max(1, round(min(setup * request.timeout_multiplier, _LONGEST)))
    return wire


def _unknown(request: RunRequest) -> list[str]:
    forms = (("", request), ("agent.", request.agent), ("verifier.", request.verifier))
    return [f"{prefix}{name} is unknown" for prefix, form in forms for name in form.unknown()]


def _valid(kind: type[Any], wire: dict[str, Any], what: str) -> Any:
    try:
        return validate(kind, wire)
    except ValidationError as error:
        problems = "; ".join(map(str, explain(error, kind, wire)))
        raise RunRefused(f"{what} is not valid: {problems}") from error

"""Rows of verl that name a Harbor task's folder, and the job for their rollouts. With `use_local_trial`, this engine
runs the task. Otherwise a Harbor server runs it, and this engine only has its prompt and its reward.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agent_runtime.integrations.harbor_server.dataset import CONFIG
from agent_runtime.integrations.harbor_server.environment import HARBORS, Environment, changed_sandbox, read_environment
from agent_runtime.integrations.harbor_server.plan import without_provider
from agent_runtime.integrations.harbor_server.settings import RemoteSettings, SettingsError
from agent_runtime.tasks import load_tasks
from rollout_api.rollout_job import CATALOG_AGENTS
from rollout_api.sandbox import Provider, SandboxOverrides
from rollout_api.tasks import Task, TaskFormat, Tasks, TaskSource, TaskVerifier, Timeouts, VerifierKind, VerifierMode

ROOTS_VARIABLE = "HARBOR_DATASET_DIRS"
"""Environment variable with more roots, separated by `:` or `,`."""


class NoTask(ValueError):
    """A row's task does not exist; the message lists the searched paths."""


def roots_of(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[Path]:
    """Return `data.train_harbor_dir`, `data.val_harbor_dir`, then HARBOR_DATASET_DIRS; each once."""
    data = config.get("data") or {}
    listed = environ.get(ROOTS_VARIABLE, "").replace(":", ",").split(",")
    names = [data.get("train_harbor_dir"), data.get("val_harbor_dir"), *listed]
    texts = [str(name).strip() for name in names if name is not None]
    return list(dict.fromkeys(Path(os.path.expanduser(text)) for text in texts if text))


def dataset_paths(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[Path]:
    """Files and folders of the dataset, which have hidden tests and solutions. Missing ones are left out."""
    data = config.get("data") or {}
    listed = (data.get(name) or [] for name in ("train_files", "val_files"))
    files = [file for names in listed for file in ([names] if isinstance(names, str) else names)]
    wanted = [*roots_of(config, environ), *(Path(os.path.expanduser(str(file))) for file in files)]
    return [path.absolute() for path in wanted if path.exists()]


def task_path(instance_id: str, local_task_path: str | None, roots: Sequence[Path], template: str | None) -> Path:
    """Return the folder of a task: `local_task_path`, else `<root>/<instance_id>`, else the template with
    `{instance_id}`.

    Raises NoTask if none of them is a folder, and for an id that leaves its root.
    """
    tried: list[Path] = []
    if local_task_path:
        tried.append(Path(os.path.expanduser(local_task_path)))
    if instance_id:
        if instance_id.startswith("/") or ".." in Path(instance_id).parts:
            raise NoTask(f"instance_id {instance_id!r} is not inside the folders of tasks; expected a name in them")
        tried += [root / instance_id for root in roots]
        if template:
            tried.append(Path(os.path.expanduser(template.replace("{instance_id}", instance_id))))
    found = next((path for path in tried if path.is_dir()), None)
    if found is None:
        listed = ", ".join(map(str, tried)) or "nowhere: the row has neither local_task_path nor instance_id"
        raise NoTask(
            f"the task {instance_id!r} does not exist; searched {listed}. Set data.train_harbor_dir, "
            f"{ROOTS_VARIABLE} or "
            "REMOTE_AGENT_TASK_PATH_TEMPLATE"
        )
    return found


_WEEK: Final = 604_800
"""Longest time for an agent. The server limits a trial itself."""
OWN_KEY = "agent_rollouts"
"""Our key in `rollout.custom`, which verl leaves to extensions."""
_MOST_TURNS: Final = 100_000
"""The largest value in a manifest, because turns are unlimited in PR #83: the agent on the server has its own limit."""
AGENTS: Final = ("ToolCalling", "ReAct", "Coding", "SWE", "Oracle", "Nop", *CATALOG_AGENTS)
"""Our agents for values of `agent_name`; `swe-agent` is `SWE`, `claude-code` is `ClaudeCode`."""


@dataclass(frozen=True)
class HarborRows:
    """Finds and reads the task of a row."""

    config: Mapping[str, Any]
    environ: Mapping[str, str] = field(repr=False)
    settings: RemoteSettings | None

    @property
    def on_server(self) -> bool:
        return self.settings is not None and not self.settings.use_local_trial

    def task(self, fields: Mapping[str, Any]) -> Task | None:
        """Return the task of a row; None for a row that names no folder. Raises NoTask, TaskSourceError."""
        local, instance = fields.get("local_task_path"), fields.get("instance_id")
        if not local and not instance:
            return None
        template = None if self.settings is None else self.settings.task_path_template
        roots = roots_of(self.config, self.environ)
        folder = task_path(str(instance or ""), None if local is None else str(local), roots, template)
        if not (folder / CONFIG).is_file():
            raise NoTask(f"{folder} is not the folder of a task: it has no {CONFIG}; name the folder of one task")
        return self._of_server(folder) if self.on_server else self._read(folder)

    def _read(self, folder: Path) -> Task:
        tasks = Tasks(from_=TaskSource(uri=str(folder.resolve()), format=TaskFormat.HARBOR))
        task = load_tasks(tasks, folder, self.environ).tasks[0]
        changes = {} if self.settings is None else environment_of(self.settings).task
        if not changes:
            return task
        wire: dict[str, Any] = task.sandbox.model_dump(mode="json", by_alias=True)
        return task.model_copy(update={"sandbox": SandboxOverrides.model_validate(changed_sandbox(wire, changes))})

    def _of_server(self, folder: Path) -> Task:
        return Task(
            name=re.sub(r"[^A-Za-z0-9._@+=-]", "-", folder.name),
            prompt=(folder / "instruction.md").read_text(encoding="utf-8"),
            verifier=TaskVerifier(kind=VerifierKind.REWARD_FILE, commands=["true"], mode=VerifierMode.SHARED),
            timeouts=Timeouts(agent_seconds=_WEEK),
            sandbox=SandboxOverrides(image=str(folder.resolve())),
        )


def with_remote_agent(config: Mapping[str, Any], settings: RemoteSettings | None) -> dict[str, Any]:
    """Return verl's configuration with our settings filled in from `settings`. Raises SettingsError.

    Explicit settings of `agent`, `attempts` and `sandbox` are kept.
    """
    if settings is None:
        return dict(config)
    custom = dict(own_settings(config))
    attempts = {"limit": settings.max_retries, "backoffSeconds": settings.retry_base_delay}
    custom["attempts"] = {**attempts, **(custom.get("attempts") or {})}
    agent = dict(custom.get("agent") or {})
    if not settings.use_local_trial:
        command = [settings.agent_import_path or settings.agent_name or "default"]
        kept = {name: agent[name] for name in ("maxTurns", "tokenBudget") if name in agent}
        custom["agent"] = {"maxTurns": _MOST_TURNS, **kept, "type": "Command", "command": command}
    else:
        named = _local_agent(settings)
        custom["agent"] = {**named, **agent}
        own = custom.get("sandbox") or {}
        job = environment_of(settings).job
        if job:
            custom["sandbox"] = {**job, **own}
        if settings.environment_overrides:
            sandbox = dict(custom.get("sandbox") or {})
            added = [{"name": name, "value": str(value)} for name, value in settings.environment_overrides.items()]
            custom["sandbox"] = {**sandbox, "env": [*added, *(sandbox.get("env") or [])]}
    return with_own_settings(config, custom)


def own_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings in verl's configuration below `actor_rollout_ref.rollout.custom.agent_rollouts`; empty if
    there are none.
    """
    return ((config["actor_rollout_ref"]["rollout"].get("custom") or {}).get(OWN_KEY)) or {}


def with_own_settings(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return verl's configuration with some of our settings changed; other keys of `custom` are kept."""
    role = config["actor_rollout_ref"]
    custom = {**(role["rollout"].get("custom") or {}), OWN_KEY: {**own_settings(config), **changes}}
    return {**config, "actor_rollout_ref": {**role, "rollout": {**role["rollout"], "custom": custom}}}


def model_name_of(settings: RemoteSettings | None) -> str:
    """Return the name by which agents call verl's model: REMOTE_MODEL_NAME without the provider, which LiteLLM removes."""
    return "verl" if settings is None or settings.model_name is None else without_provider(settings.model_name)


def environment_of(settings: RemoteSettings) -> Environment:
    """Return the converted `environment_import_path` and `environment_kwargs` for a local trial. A user's class gets
    them unchanged.
    """
    path = settings.environment_import_path
    if path is not None and path not in HARBORS:
        return Environment()
    job = dict(HARBORS.get(path or "", {}))
    read = read_environment(settings.environment_kwargs or {}, job.get("provider", Provider.LOCAL))
    kodo = {**job.get("kodo", {}), **read.job.get("kodo", {})}
    return replace(read, job={**job, **read.job, **({"kodo": kodo} if kodo else {})})


def not_honoured(settings: RemoteSettings) -> list[str]:
    """Return settings that have no effect if this engine runs the trials."""
    if not settings.use_local_trial:
        return []
    proxy = (
        "remote_agent.proxy_server_url is not used with use_local_trial: sandboxes reach the model through this engine"
    )
    found = [f"environment_kwargs.{name}" for name in environment_of(settings).not_honoured]
    if settings.agent_kwargs and settings.agent_import_path is None:
        found.append("agent_kwargs")
    return [
        *([proxy] if settings.proxy_server_url else []),
        *(f"remote_agent.{name} is not supported: use rollout.custom.agent_rollouts instead" for name in found),
    ]


def _local_agent(settings: RemoteSettings) -> dict[str, Any]:
    if settings.agent_import_path is not None:
        return {"type": settings.agent_import_path, "config": dict(settings.agent_kwargs or {})}
    if settings.agent_name is None:
        return {}

    def plain(name: str) -> str:
        return re.sub(r"[^a-z]", "", name.lower()).removesuffix("agent")

    found = next((name for name in AGENTS if plain(name) == plain(settings.agent_name)), None)
    if found is None:
        raise SettingsError(
            f"remote_agent.agent_name: {settings.agent_name!r} is not an agent of this engine, which runs the "
            "trials with "
            f"use_local_trial; expected one of {', '.join(AGENTS)}, or agent_import_path. A program is run with "
            "rollout.custom.agent_rollouts.agent of type Command, and no agent_name"
        )
    return {"type": found}

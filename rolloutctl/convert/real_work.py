"""Convert Real Work's `config.json` (ritser-labs/real-work, `src/core/config.py`) into a manifest.

Terms: an environment is a task here, an episode is a rollout, `max_episodes` is the size of a group.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolloutctl.convert.base import Conversion, Converter, Keys, Note, Source, UnusableInput, manifest

TESTS_USER = "1000:1000"
"""User as which `UnitTestRunner` runs the tests."""
SNAPSHOT_EVERY = 5
"""Actions between two snapshots of `Episode`. They become turns here, which usually have one action."""
MAX_ACTIONS = 100
"""Most actions of one episode, a constant of Real Work's agent loop."""
CONTAINER = {"cpu": "2", "memory": "2Gi"}
"""Resources that `Environment.initialize` sets for each container."""
CLI_MODEL = {"model": "anthropic/claude-4-sonnet", "base_url": "https://openrouter.ai/api/v1"}
"""Model that `main.py` uses if the file has no `llm_config`."""
CLI_SAMPLING = {"temperature": 0.7, "max_tokens": 4096, "timeout": 60}
TIMEOUTS = {"global_timeout": 3600, "command_timeout": 300, "test_timeout": 120}

_LLM_REASONS = {
    "enable_caching": "a repeated answer is not a sample of the policy",
    "cache_size": "a repeated answer is not a sample of the policy",
    "max_context_messages": "the whole conversation is sent",
    "max_output_length": "a tool's result is cut at 64 KiB, head and tail kept",
    "track_token_usage": "usage is always recorded",
    "max_cost_per_episode": "agent.tokenBudget bounds tokens, not money",
    "warn_high_usage": "`rolloutctl results` shows usage",
}
_ROLLOUT_REASONS = {"save_trajectory_interval": "every step is recorded immediately"}
_ENVIRONMENT_REASONS = {
    "max_retries": "attempts.limit of the job sets how often a rollout is retried after infrastructure failures"
}


def recognises(values: Mapping[str, Any]) -> bool:
    environments = values.get("environments")
    return (
        isinstance(environments, list)
        and bool(environments)
        and all(isinstance(e, dict) and "docker_image" in e and "unit_tests" in e for e in environments)
    )


def convert(source: Source) -> Conversion:
    if source.evaluation:
        raise UnusableInput("a Real Work configuration describes one job; leave out --eval")
    if source.overrides:
        raise UnusableInput(
            f"{source.overrides[0]!r}: Hydra overrides are only for ROLL files; change the configuration file instead"
        )
    notes: list[Note] = []
    keys = Keys(source.values, "", notes)
    rollouts = keys.below("rollout_config")
    timeouts = keys.take("timeout_config", {})
    environments = keys.require("environments", list)
    tasks = [_task(Keys(e, f"environments[{n}]", notes), timeouts, source) for n, e in enumerate(environments)]
    model, sampling = _model(keys, source.llm)
    group_size, stops = _episodes(keys.below("episode_control_config"))
    enabled = rollouts.take("enable_plugins", True)
    plugins = (stops or [{"name": "PerformanceStop"}]) + _PLUGINS if enabled else stops
    spec: dict[str, Any] = {
        "mode": "Eval",
        "groupSize": group_size,
        "tasks": {"inline": tasks},
        "model": model,
        "sampling": sampling,
        "agent": {"type": "ToolCalling", "tools": ["commands-and-files"], "maxTurns": MAX_ACTIONS},
        "sandbox": {"resources": CONTAINER, "network": {"setup": "Public"}},
        "runners": {"concurrency": rollouts.take("max_parallel_rollouts", 4)},
        "output": {"uri": rollouts.take("trajectory_output_path", "trajectories")},
    }
    if template := keys.take("template_prompt", ""):
        spec["agent"]["systemPrompt"] = template
    modules: list[str] = keys.take("plugins", [])
    if modules and not enabled:
        keys.note("plugins", "are not loaded, because rollout_config.enable_plugins is false")
    elif modules:
        plugins = [*plugins, {"name": "RealWork", "config": {"modules": modules}}]
        keys.note(
            "plugins",
            "are run by an adapter; the folder with their modules, and Real Work's own src, must be on PYTHONPATH",
        )
    if plugins:
        spec["plugins"] = plugins
    if rollouts.take("state_persistence_enabled", True):
        spec["sandbox"]["snapshotEveryTurns"] = SNAPSHOT_EVERY
    rollouts.report_rest(_ROLLOUT_REASONS)
    keys.report_rest({})
    notes += _DIFFERENCES
    folder = source.path.resolve().parent.name
    return Conversion(manifest(folder if source.path.stem == "config" else source.path.stem, spec), notes)


_PLUGINS = [{"name": "TrajectoryAnalysis"}, {"name": "SafetyFilter"}]
"""Plugins that Real Work loads, besides the performance-based stop, whenever plugins are enabled."""

_DIFFERENCES = (
    Note("", "sandbox.network.setup is Public, so that init_commands can download; agent and tests have no network. In Real "
         "Work they have one: set sandbox.network.agent to Public if the agent has to download something"),
    Note("", "unit_tests run in a new workspace with a copy of the working directory. It has no processes of the agent, and "
         "no files that the agent wrote elsewhere; the reward is the share of the commands that pass"),
)  # fmt: skip


def _task(keys: Keys, common: Mapping[str, Any], source: Source) -> dict[str, Any]:
    setup: list[str] = keys.take("init_commands", [])
    tests: list[str] = keys.require("unit_tests", list)
    # Real Work uses an environment's own limits instead of the common ones, with defaults for missing limits.
    own = Keys(keys.take("timeout_config", common), keys.where("timeout_config"), keys.notes)
    limits = {name: own.take(name, default) for name, default in TIMEOUTS.items()}
    own.report_rest({})
    name = keys.require("id", str)
    task: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._@+=-]+", "-", name).strip("-._@+=") or "task"}
    if task["name"] != name:
        keys.note("id", f"is {task['name']} here: names have letters, digits and ._@+=- only")
    task["prompt"] = keys.require("prompt", str)
    if files := _files(keys, source):
        task["files"] = files
    if setup:
        task["setup"] = setup
    task["verifier"] = {"commands": tests, "user": TESTS_USER}
    task["timeouts"] = {
        "setupSeconds": limits["command_timeout"] * max(1, len(setup)),
        "agentSeconds": limits["global_timeout"],
        "commandSeconds": limits["command_timeout"],
        "verifierSeconds": limits["test_timeout"] * len(tests),
    }
    variables: Mapping[str, Any] = keys.take("environment_variables", {})
    task["sandbox"] = {
        "image": keys.require("docker_image", str),
        "workingDir": keys.take("working_directory", "/workspace"),
        "env": [{"name": name, "value": str(value)} for name, value in variables.items()],
    }
    keys.report_rest(_ENVIRONMENT_REASONS)
    return task


def _files(keys: Keys, source: Source) -> list[dict[str, Any]]:
    """Return the files below `copy_folders`, in a folder of the same name in the working directory."""
    folders: Sequence[str] = keys.take("copy_folders", [])
    files = []
    for folder in folders:
        root = _found(str(folder), keys.where("copy_folders"), source)
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files.append({"path": f"{root.name}/{path.relative_to(root)}", **_content(path)})
    if files:
        keys.note(
            "copy_folders",
            "are copied into the manifest as files, which the agent can change. Move files that decide the verdict to "
            "verifier.files, which replace existing files during the grading",
        )
    return files


def _found(folder: str, where: str, source: Source) -> Path:
    """Resolve a path. Real Work's paths start at the folder where main.py starts, usually above the configuration."""
    for above in (*source.path.resolve().parents, Path.cwd()):
        if folder.strip("./") and (above / folder).is_dir():
            return (above / folder).resolve()
    raise UnusableInput(
        f"{where}: folder {folder} was found neither relative to the folders above the configuration nor to {Path.cwd()}; "
        "run this command in the folder where main.py is started"
    )


def _content(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    mode = {"mode": "755"} if path.stat().st_mode & 0o100 else {}
    try:
        return {"content": data.decode(), **mode}
    except UnicodeDecodeError:
        return {"contentBase64": base64.b64encode(data).decode(), **mode}


def _model(keys: Keys, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if not keys.values.get("llm_config") and not {"model", "base_url"} <= set(options):
        keys.note("llm_config", f"is absent: {CLI_MODEL['model']} at {CLI_MODEL['base_url']} is used, as by main.py")
    given = bool(keys.values.get("llm_config"))
    llm = Keys({**keys.take("llm_config", {}), **options}, "llm_config", keys.notes)
    name = llm.take("model", "gpt-4" if given else CLI_MODEL["model"])
    url = llm.take("base_url", "https://api.openai.com/v1" if given else CLI_MODEL["base_url"])
    variable = "OPENROUTER_API_KEY" if "openrouter.ai" in url else "OPENAI_API_KEY"
    if llm.take("api_key", ""):
        llm.note("api_key", f"a manifest must not contain a key; set it in the environment as {variable}")
    endpoint = {
        "baseURL": url,
        "name": name,
        "apiKeyFrom": {"env": variable},
        "callSeconds": llm.take("timeout", CLI_SAMPLING["timeout"]),
    }
    sampling = {
        "temperature": llm.take("temperature", CLI_SAMPLING["temperature"]),
        "maxTokens": llm.take("max_tokens", CLI_SAMPLING["max_tokens"]),
    }
    llm.report_rest(_LLM_REASONS)
    return {"endpoint": endpoint}, sampling


def _episodes(keys: Keys) -> tuple[int, list[dict[str, Any]]]:
    most = keys.take("max_episodes", 1)
    size = min(keys.take("max_episodes_per_env", most), keys.take("safety_limit", MAX_ACTIONS))
    stops = []
    if keys.take("stop_on_success", False):
        stops.append({"name": "PerformanceStop", "config": {"threshold": 1, "minEpisodes": 1, "maxEpisodes": size}})
        keys.note("stop_on_success", "success means a passed verdict, not the model's own statement")
    keys.report_rest({"min_success_rate": "plugin PerformanceStop ends a group by the rewards of its last members"})
    return size, stops


REAL_WORK = Converter("Real Work", recognises, convert)

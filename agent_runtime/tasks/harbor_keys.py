"""Every key of Harbor's `task.toml` (schema 1.0 to 1.4), and its handling here.

The keys are those of Harbor 0.25's own models. Other keys are reported as unknown; Harbor itself ignores them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_NETWORK: Final = "network_mode allowed_hosts"
_HEALTH: Final = "command interval_sec timeout_sec start_period_sec start_interval_sec retries"


def _paths(prefix: str, names: str) -> dict[str, str]:
    return {f"{prefix}{name}": "" for name in names.split()}


HONOURED: Final[Mapping[str, str]] = {
    **_paths("", "schema_version version source multi_step_reward_strategy artifacts[] artifacts[].source"),
    **_paths("", "task.* metadata.* solution.env.*"),
    **_paths("agent.", f"timeout_sec user {_NETWORK}"),
    **_paths("verifier.", f"timeout_sec env.* user environment_mode {_NETWORK} collect[].command"),
    **_paths("verifier.environment.", f"docker_image env.* allow_internet build_timeout_sec {_NETWORK}"),
    **_paths("environment.", f"docker_image os cpus memory_mb storage_mb env.* workdir {_NETWORK} build_timeout_sec"),
    **_paths("environment.", "memory storage allow_internet"),
    **_paths("environment.healthcheck.", _HEALTH),
    **_paths(
        "steps[].", "name agent.timeout_sec verifier.timeout_sec verifier.env.* verifier.user min_reward min_reward.*"
    ),
    **_paths("steps[].healthcheck.", _HEALTH),
}
"""Supported keys; `[task]`, `[metadata]` and `source` are descriptions only, in Harbor as well."""

_ELSEWHERE: Final = "the grading has the limits and settings of the task's own environment"
_WHOLE_TASK: Final = "all steps use the settings of the task"

REPORTED: Final[Mapping[str, str]] = {
    "artifacts[].destination": "`rolloutctl export --format harbor` keeps graded files under their own paths",
    "artifacts[].exclude": "the whole folder is used",
    "artifacts[].service": "only one container is supported, and its file is used",
    "verifier.collect[].service": "only one container is supported, and the command runs in it",
    "verifier.collect[].timeout_sec": "verifier.timeout_sec bounds each of these commands",
    "verifier.collect[].user": "the command runs as the agent's user",
    "verifier.environment.": _ELSEWHERE,
    "environment.gpus": "no GPU is requested; request it in the job's sandbox.podTemplate",
    "environment.gpu_types": "no GPU is requested; request it in the job's sandbox.podTemplate",
    "environment.mcp_servers": "the agent gets the tools of the job; name the servers in the job",
    "environment.skills_dir": "skills are not supported; the folder stays in the image",
    "steps[].agent.": _WHOLE_TASK,
    "steps[].verifier.": "a step is graded in the agent's workspace, and all steps have the network of the task",
    "steps[].artifacts": "only the step's rewards are kept",
}
"""Keys without effect, and what happens instead. A name that ends with a dot includes all keys below it."""

REFUSED: Final[Mapping[str, str]] = {"environment.tpu": "TPUs are not supported; remove the task"}
"""Keys without which the task would be a different task, so it is refused."""


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Return the paths of all values of a document, such as `artifacts[].source`, without positions in lists.

    Empty values, and values that request nothing (`gpus = 0`), are left out.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for entry in value:
            yield from leaves(entry, f"{path}[]")
    elif value != [] and not (path.endswith("gpus") and value == 0):
        yield f"{path}[]" if path == "artifacts" else path


def handling_of(path: str) -> tuple[str, str]:
    """Return the handling of a key: (`honoured` | `reported` | `refused`, what happens instead)."""
    if any(path == key or (key.endswith(".*") and path.startswith(key[:-1])) for key in HONOURED):
        return "honoured", ""
    for table, name in ((REFUSED, "refused"), (REPORTED, "reported")):
        for key, instead in table.items():
            if path == key or path.startswith((f"{key}.", f"{key}[")) or (key.endswith(".") and path.startswith(key)):
                return name, instead
    return "reported", "is not a key of Harbor's schema, which ignores it too; look for a typing error"


def line_of(text: str, path: str) -> int | None:
    """Return the line of a key in a TOML text, or of its inline table; None if neither is found."""
    wanted = path.replace("[]", "").split(".")
    section: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            section = _parts(header[1])
        elif "=" in line:
            found = section + _parts(line.partition("=")[0])
            if found == wanted[: len(found)]:
                return number
    return None


def _parts(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in key.split(".")]

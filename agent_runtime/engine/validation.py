"""Validate names, keys and locations in a manifest against this machine, and report all problems at once."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from agent_runtime.agents.registry import find_agent
from agent_runtime.engine.attempt.mcp import server_keys
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelConfigError
from agent_runtime.models.factory import open_model
from agent_runtime.plugins.plugins import Plugins
from agent_runtime.recording.job_record import output_uri
from agent_runtime.recording.store import StorageError, Store, local_folder
from agent_runtime.tools.registry import open_tools
from rollout_api.manifest import Location
from rollout_api.rollout_job import AGENTS_WITHOUT_MODEL, RolloutJob

STORAGE_SECONDS: Final = 5.0

Found = tuple[Location, str]
"""A field and its problem."""


async def wrong_fields(job: RolloutJob, base_dir: Path, environ: Mapping[str, str]) -> list[Found]:
    """Return the fields that cannot be used on this machine, without running or writing anything. Secrets and
    ModelServers are not checked, because they exist only in a cluster.
    """
    found: list[Found] = []
    for location, check in _checks(job, environ):
        try:
            check()
        except (ExtensionError, ModelConfigError) as error:
            if str(error) not in {message for _, message in found}:
                found.append((("spec", *location), str(error)))
    if job.spec.output.secret_ref is None and (problem := await _storage_problem(output_uri(job, base_dir), environ)):
        found.append((("spec", "output", "uri"), problem))
    return found


def _checks(job: RolloutJob, environ: Mapping[str, str]) -> list[tuple[Location, Callable[[], object]]]:
    agent, model = job.spec.agent, job.spec.model
    checks: list[tuple[Location, Callable[[], object]]] = []
    if not agent.is_program:
        checks.append((("agent", "type"), partial(find_agent, agent.type)))
        checks += [(("agent", "tools", n), partial(open_tools, [name])) for n, name in enumerate(agent.tools)]
        checks.append((("agent", "tools"), partial(open_tools, agent.tools)))
    for n, server in enumerate(agent.mcp_servers):
        if server.api_key_from is None or server.api_key_from.secret_key_ref is None:
            alone = agent.model_copy(update={"mcp_servers": [server]})
            checks.append((("agent", "mcpServers", n), partial(server_keys, alone, environ)))
    checks += [(("plugins", n), partial(Plugins.open, [use])) for n, use in enumerate(job.spec.plugins)]
    checks.append((("plugins",), partial(Plugins.open, job.spec.plugins)))
    if model is not None and agent.type not in AGENTS_WITHOUT_MODEL:
        key = model.endpoint.api_key_from if model.endpoint else None
        if not (model.server or model.server_ref or (key and key.secret_key_ref)):
            checks.append((("model",), partial(open_model, model, environ)))
    return checks


async def _storage_problem(uri: str, environ: Mapping[str, str]) -> str | None:
    if (folder := local_folder(uri)) is not None:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        return None if usable else f"{existing} is not a writable folder; change its permissions or the URI"
    try:
        await Store.open(uri, environ, patience_seconds=STORAGE_SECONDS).get("job.json")
    except StorageError as error:
        answer = str(error).rpartition("The last answer: ")[2]
        return (
            f"{uri} cannot be read: {answer}. Set the store's credentials in the environment, such as "
            "AWS_ACCESS_KEY_ID. "
            "For a cluster, name the Secret that holds them in output.secretRef"
        )
    return None

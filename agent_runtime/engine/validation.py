"""Validate names, keys, the model and the storage of a manifest from this machine, and report all problems at once."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from agent_runtime.agents.registry import find_agent
from agent_runtime.engine.attempt.mcp import server_keys
from agent_runtime.engine.opening import refuse_text_only
from agent_runtime.extensions import ExtensionError, create
from agent_runtime.models.base import ModelConfigError, ModelError
from agent_runtime.models.factory import open_model
from agent_runtime.plugins.plugins import Plugins
from agent_runtime.recording.job_record import output_uri
from agent_runtime.recording.store import StorageError, Store, local_folder
from agent_runtime.tools.registry import open_tools
from rollout_api.manifest import Location
from rollout_api.model import ModelSpec
from rollout_api.rollout_job import AGENTS_WITHOUT_MODEL, RolloutJob

STORAGE_SECONDS: Final = 5.0
MODEL_SECONDS: Final = 60.0
"""Time limit of the model's test call: as long as a server may take to answer behind other requests."""

_IF_ELSEWHERE: Final = "If only a cluster reaches it, use `rolloutctl validate --offline`"

Found = tuple[Location, str]
"""A field and its problem."""


async def wrong_fields(
    job: RolloutJob, base_dir: Path, environ: Mapping[str, str], *, offline: bool = False
) -> list[Found]:
    """Return the fields that cannot be used on this machine. Unless `offline`, the model is called, and an object is
    written to remote storage and deleted. Secrets and ModelServers are not checked, because they exist only in a
    cluster.
    """
    found: list[Found] = []
    for location, check in _checks(job, environ):
        try:
            check()
        except (ExtensionError, ModelConfigError) as error:
            if str(error) not in {message for _, message in found}:
                found.append((("spec", *location), str(error)))
    is_open = not any(location[1] == "model" for location, _ in found)
    if not offline and is_open and (problem := await _model_problem(job, environ)):
        found.append((("spec", "model"), problem))
    uri = output_uri(job, base_dir)
    if (folder := local_folder(uri)) is not None:
        problem = _folder_problem(folder)
    else:
        skipped = offline or job.spec.output.secret_ref is not None
        problem = None if skipped else await _storage_problem(uri, environ)
    if problem is not None:
        found.append((("spec", "output", "uri"), problem))
    return found


def _checks(job: RolloutJob, environ: Mapping[str, str]) -> list[tuple[Location, Callable[[], object]]]:
    agent = job.spec.agent
    checks: list[tuple[Location, Callable[[], object]]] = []
    if not agent.is_program:
        checks.append((("agent", "type"), lambda: create("agent", agent.type, find_agent(agent.type))))
        checks += [(("agent", "tools", n), partial(open_tools, [name])) for n, name in enumerate(agent.tools)]
        checks.append((("agent", "tools"), partial(open_tools, agent.tools)))
    for n, server in enumerate(agent.mcp_servers):
        if server.api_key_from is None or server.api_key_from.secret_key_ref is None:
            alone = agent.model_copy(update={"mcp_servers": [server]})
            checks.append((("agent", "mcpServers", n), partial(server_keys, alone, environ)))
    checks += [(("plugins", n), partial(Plugins.open, [use])) for n, use in enumerate(job.spec.plugins)]
    checks.append((("plugins",), partial(Plugins.open, job.spec.plugins)))
    if (model := _reachable_model(job)) is not None:
        checks.append((("model",), partial(open_model, model, environ)))
    return checks


def _reachable_model(job: RolloutJob) -> ModelSpec | None:
    """Return the model that the job calls; None if it calls none, or one that only a cluster can reach."""
    model = job.spec.model
    if model is None or job.spec.agent.type in AGENTS_WITHOUT_MODEL:
        return None
    key = model.endpoint.api_key_from if model.endpoint else None
    return None if model.server or model.server_ref or (key and key.secret_key_ref) else model


async def _model_problem(job: RolloutJob, environ: Mapping[str, str]) -> str | None:
    if (spec := _reachable_model(job)) is None:
        return None
    model = open_model(spec, environ)
    try:
        async with asyncio.timeout(MODEL_SECONDS):
            await model.check()
        refuse_text_only(job, model)
    except TimeoutError:
        return f"the model did not answer a test call within {MODEL_SECONDS:g} s. {_IF_ELSEWHERE}"
    except ModelError as error:
        return f"{error}. {_IF_ELSEWHERE}"
    finally:
        await model.close()
    return None


def _folder_problem(folder: Path) -> str | None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, expected a folder; change the URI"
    try:
        # Some file systems, such as /proc, refuse what the permissions allow.
        os.rmdir(tempfile.mkdtemp(prefix=".agent-rollouts-", dir=existing))
    except OSError as error:
        return f"{existing} is not writable ({error.strerror}); change its permissions or the URI"
    return None


async def _storage_problem(uri: str, environ: Mapping[str, str]) -> str | None:
    try:
        await Store.open(uri, environ, patience_seconds=STORAGE_SECONDS).probe()
    except StorageError as error:
        answer = str(error).rpartition("The last answer: ")[2]
        return (
            f"{uri} cannot be used: {answer}. Set the store's credentials in the environment, such as "
            "AWS_ACCESS_KEY_ID. "
            "For a cluster, name the Secret that holds them in output.secretRef"
        )
    return None

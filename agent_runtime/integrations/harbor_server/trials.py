"""Trials on a Harbor server as sandboxes of the engine: a workspace is one trial, whose program runs elsewhere.

So a trial is an ordinary attempt: it is recorded with its tokens, retried with a new key after an infrastructure
failure, and masked if no attempt is left. The workspace's image is the path of the task's folder. Running its program
runs the trial, and the verifier's reward file has the server's rewards.
"""

import base64
import contextlib
import hmac
import json
import math
import re
import secrets
import socket
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from yarl import URL

from agent_runtime.engine.program.program import PROGRAM_KEY
from agent_runtime.grading.reward_file import HIGHEST, JSON_PATH, LOWEST
from agent_runtime.integrations.harbor_server.client import HarborClient, TrialFailed, TrialLost
from agent_runtime.integrations.harbor_server.environment import own_provider
from agent_runtime.integrations.harbor_server.model_routers import ModelAccess, ModelRouter, RelayedModelRouter
from agent_runtime.integrations.harbor_server.schemas import RunResult, RunStatus
from agent_runtime.integrations.harbor_server.settings import SERVER_KEY, RemoteSettings
from agent_runtime.proxy.keys import session_of
from agent_runtime.sandboxes.base import (
    INTERRUPTED,
    CommandResult,
    Evidence,
    Fence,
    FileStat,
    GradesItself,
    SandboxFailure,
    SandboxProvider,
    WorkspaceSpec,
)
from agent_runtime.sandboxes.no_sandbox import NoSandbox, NoSandboxes
from agent_runtime.tasks.harbor import VERIFIER_SECONDS

GRACE_SECONDS: Final = 1800.0
"""Time of a trial in addition to the agent's and the verifier's, for building images (Harbor's default is 600 s)."""

GRADED_ERRORS: Final = re.compile(
    "AgentTimeoutError|AgentSafetyRefusalError|ContextWindowExceededError|OutputTokenExceededError"
    # The agent's program failed. Harbor derives the exception from the program's output, which the policy controls.
    "|Api[A-Za-z]*Error|UnknownApiError|NonZeroAgentExitCodeError|AgentAuthenticationError|ModelNotFoundError"
    "|NetworkConnectionError|UnsupportedModelParametersError"
    # The verifier failed, which the policy's files can cause. ValidationError: rewards that are no object.
    "|VerifierTimeoutError|VerifierOutputParseError|RewardFileNotFoundError|RewardFileEmptyError|ValidationError"
    "|MemoryLimitExceededError|SandboxLikelyOutOfMemoryError"
)
"""Exceptions of Harbor 0.26 that a policy can cause. Such a trial gets reward 0, unless a model call failed at the proxy, or
the proxy answered none.
"""


class HarborTrials(NoSandboxes):
    """Implements SandboxProvider. Model calls of all trials arrive at the front, which several providers may share."""

    name = "harbor"

    def __init__(self, settings: RemoteSettings, environ: Mapping[str, str], router: ModelRouter) -> None:
        self._settings, self._front = settings, router
        self._client = HarborClient(settings.harbor_server_url, environ.get(SERVER_KEY) or None)

    async def open(self) -> None:
        try:
            await self._front.open()
        except OSError as error:
            where = f"{self._settings.proxy_host}:{self._settings.proxy_port}"
            message = f"proxy_server: cannot listen on {where}: {error.strerror}; with several workers use port 0"
            raise SandboxFailure("ProviderUnavailable", message) from error

    async def acquire(self, spec: WorkspaceSpec, *, attempt: str, fence: Fence, name: str) -> "Trial":
        return Trial(self._settings, self._client, self._front, Path(spec.image or ""))

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> "Trial":
        """Refuse: the trial calls the model at the address of the process that began it."""
        raise SandboxFailure(
            INTERRUPTED, "the process that ran the trial has ended, so its model's address is unreachable"
        )

    async def sweep(self, unwanted: Callable[[str, str], bool]) -> None:
        """Do nothing: trials of an earlier process end, because they have no model any more."""

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        await self._front.close()


class Trial(NoSandbox, GradesItself):
    """Implements the parts of Workspace that a program and a reward file need."""

    def __init__(self, settings: RemoteSettings, client: HarborClient, router: ModelRouter, folder: Path) -> None:
        self._settings, self._client, self._front, self._folder = settings, client, router, folder
        self._secret = secrets.token_bytes(32)
        self._asked: set[str] = set()
        self._rewards = b""
        self._id = str(uuid.uuid4())
        self.handle = {"trial": self._id}
        self.description = {"provider": "harbor", "server": str(URL(settings.harbor_server_url).with_user(None))}

    async def run(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        deadline_seconds: float,
        env: Mapping[str, str] | None = None,
        **_: Any,
    ) -> CommandResult:
        """Run the trial to its end, as the program. The server does everything else."""
        if key != PROGRAM_KEY:
            return _ended(0)
        variables = dict(env or {})
        model = variables["OPENAI_MODEL"]
        async with self._front.session(variables["OPENAI_API_KEY"], model) as access:
            metadata = trial_request(self._settings, self._folder, access, model)
            seconds = self._settings.harbor_timeout + GRACE_SECONDS + verifier_seconds(self._folder)
            result = await self._client.run(self._folder, metadata, idempotency_key=self._id, seconds=seconds)
        if result.status != RunStatus.COMPLETED and access.failure is not None:
            raise TrialFailed("ModelFailed", f"the agent's last call at the proxy failed: {access.failure}")
        if result.status != RunStatus.COMPLETED and not self._front.has_answered(self._asked):
            why = result.error or f"the server reports {result.status}"
            raise TrialLost("NotAnswered", f"the trial has failed before the model answered its agent: {why}")
        rewards = rewards_of(result)
        self._rewards = b"" if rewards is None else json.dumps(rewards).encode()
        return _ended(0 if result.status == RunStatus.COMPLETED else 1, result.error or "")

    async def write(self, path: str, data: bytes, *, key: str, **_: Any) -> None:
        """Do nothing: the server grades the trial."""

    async def remove(self, path: str, *, key: str, **_: Any) -> None:
        """See `write`."""

    async def stat(self, path: str, *, key: str | None = None, **_: Any) -> FileStat | None:
        has_rewards = path == JSON_PATH and self._rewards
        return FileStat(path, "file", len(self._rewards), 0o644, 0.0) if has_rewards else None

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20, **_: Any) -> bytes:
        return self._rewards

    def secret(self, purpose: str) -> bytes:
        found = hmac.digest(self._secret, purpose.encode(), "sha256")
        self._asked.add(base64.urlsafe_b64encode(found).decode().rstrip("="))
        return found

    def serve_model(self, server: web.Server) -> AbstractAsyncContextManager[str]:
        """Serve the model at the address of all trials, for keys of this trial's secrets."""
        return self._front.serving(self._asked, server)

    async def missed_requests(self) -> int:
        """Return 0: missed requests are not counted here."""
        return 0

    async def failed_connections(self) -> Mapping[str, str | None]:
        """Return nothing: a trial's server grades it."""
        return {}

    async def stood_still(self) -> float:
        """Return 0: a trial's server grades it."""
        return 0


def verifier_seconds(folder: Path) -> float:
    """Return the time limit of a task's gradings, after which its server grades it 0. A trial is only lost later, because
    the policy's code may use up that time.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # the server reports a bad file
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        own = config.get("verifier", {}).get("timeout_sec", VERIFIER_SECONDS)
        limits = [step.get("verifier", {}).get("timeout_sec", own) for step in config.get("steps", [])]
        return float(sum(limits or [own]))
    return VERIFIER_SECONDS


def trial_request(settings: RemoteSettings, folder: Path, access: ModelAccess, model: str) -> dict[str, Any]:
    """Return the metadata of a trial whose agent reaches `model` there. Pure."""
    kwargs = {**(settings.agent_kwargs or {}), "model_base_url": access.url, "session_id": session_of(access.key)}
    agent: dict[str, Any] = {
        "model_name": settings.model_name or f"openai/{model}",
        "max_timeout_sec": settings.harbor_timeout,
        "llm_proxy_url": access.url,
        "kwargs": kwargs,
    }
    if settings.agent_import_path is not None:
        agent["import_path"] = settings.agent_import_path
    elif settings.agent_name is not None:
        agent["name"] = settings.agent_name
    return {
        "task_path": str(folder),
        "agent": agent,
        "timeout_multiplier": 1.0,
        "verifier": {"disable": False},
        "environment_overrides": {
            "OPENAI_API_KEY": access.key,
            "OPENAI_BASE_URL": access.url,
            **(settings.environment_overrides or {}),
        },
        "environment_kwargs": dict(settings.environment_kwargs or {}),
    }


def rewards_of(result: RunResult) -> dict[str, float] | None:
    """Return the rewards of a trial, and their sum, limited to -1 to 1, as `reward`, as PR #83 does; None if the policy is
    the cause that there are none, which `verifier.failedReward` grades. Raises TrialLost if it is not.
    """
    reason = (result.error or "").partition(":")[0].strip()
    if result.status == RunStatus.TIMEOUT or (result.status != RunStatus.COMPLETED and GRADED_ERRORS.fullmatch(reason)):
        return None  # the server reports an error that the policy can cause
    if result.status != RunStatus.COMPLETED:
        is_outside = SandboxFailure(reason, "").evidence is Evidence.OUTSIDE
        why = f"the server reports {result.status}: {result.error or 'no reason given'}"
        raise (TrialLost if is_outside else TrialFailed)("TrialFailed", why)
    if result.rewards is None:  # an empty reward file is the policy's, like one that cannot be read
        raise TrialLost(
            "NoReward", "the trial was completed, but the server returned no reward; check that the task has a verifier"
        )
    # Limit the sum instead of refusing it, because the policy may have written it, and must not be able to discard its
    # trial.
    rewards = {name: math.nan if reward is None else reward for name, reward in result.rewards.items()}
    total = sum(rewards.values())
    return None if math.isnan(total) or not rewards else {**rewards, "reward": min(max(total, LOWEST), HIGHEST)}


def make_trials(settings: RemoteSettings | None, environ: Mapping[str, str]) -> Callable[[], SandboxProvider] | None:
    """Return a function that makes each job's provider, with all trials behind one front; None if our settings name a
    provider. Raises SettingsError.
    """
    if settings is None:
        return None
    if settings.use_local_trial:
        return own_provider(settings)
    router = (
        ModelRouter(settings.proxy_host, settings.proxy_port, _public_host(settings))
        if settings.proxy_server_url is None
        else RelayedModelRouter(settings, environ, settings.harbor_timeout + GRACE_SECONDS)
    )
    return lambda: HarborTrials(settings, environ, router)


def _public_host(settings: RemoteSettings) -> str:
    if settings.llm_proxy_ip is not None:
        return settings.llm_proxy_ip
    if URL(settings.harbor_server_url).host in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def _ended(code: int, message: str = "") -> CommandResult:
    data = message.encode(errors="replace")
    return CommandResult(code, None, None, 0.0, b"", data, 0, len(data))

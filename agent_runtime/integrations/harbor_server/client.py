"""A client of `POST /api/v1/runs`: the Harbor server of verl-recipe PR #83, or ours.

It sends `Prefer: respond-async`. A server that supports it answers 202, and the client fetches the result, also after
restarts of the server. Other servers answer when the run has ended.
"""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
from pydantic import ValidationError

from agent_runtime.integrations.harbor_server.archive import pack
from agent_runtime.integrations.harbor_server.schemas import ARCHIVE, METADATA, PATH, RunResult, RunStatus
from agent_runtime.sandboxes.base import Evidence, ProgramFailed, SandboxFailure

FETCH_SECONDS: Final = 30
"""How long a fetch waits at the server for the end of the run."""
AWAY_SECONDS: Final = 120.0
"""How long a server may be unavailable during a run, such as for a restart or an upgrade."""
PAUSE_SECONDS: Final = 1.0
CONNECT_SECONDS: Final = 30.0
SHOWN: Final = 500


class TrialLost(SandboxFailure):
    """The server did not complete the trial, for a reason that the policy did not cause."""

    evidence = Evidence.OUTSIDE


class TrialFailed(TrialLost, ProgramFailed):
    """The server reports that the trial has failed, or has not ended it in time."""


class HarborClient:
    """`url` may have a user and the key as password; `key` is sent as a bearer token."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url, self._headers = url.rstrip("/"), {} if key is None else {"Authorization": f"Bearer {key}"}

    async def run(self, folder: Path, metadata: dict[str, Any], *, idempotency_key: str, seconds: float) -> RunResult:
        """Run a trial of the task in a folder, from upload to result, within this many seconds. Raises TrialLost.

        If cancelled, it ends the trial if the server supports that.
        """
        archive = await asyncio.to_thread(pack, folder)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        run_id: str | None = None
        try:
            async with asyncio.timeout(seconds), aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http:
                form = aiohttp.FormData()
                form.add_field(METADATA, json.dumps(metadata))
                form.add_field(ARCHIVE, archive, filename="task.tar.gz", content_type="application/gzip")
                headers = {"Prefer": "respond-async", "Idempotency-Key": idempotency_key}
                async with http.post(f"{self._url}{PATH}", data=form, headers=headers) as reply:
                    result = await _result(reply)
                run_id = result.run_id
                if reply.status == 202:
                    result = await self._fetch(http, run_id)
                run_id = None
                return result
        except TimeoutError:
            raise TrialFailed("TrialTimeout", f"{self._where}: the trial did not end within {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise TrialLost("HarborUnreachable", f"{self._where}: {type(error).__name__}: {error}") from error
        finally:
            if run_id is not None:
                await asyncio.shield(self._end(run_id))

    async def _fetch(self, http: aiohttp.ClientSession, run_id: str) -> RunResult:
        answered = time.monotonic()
        while True:
            try:
                async with http.get(f"{self._url}{PATH}/{run_id}", params={"wait": str(FETCH_SECONDS)}) as reply:
                    if reply.status >= 500:  # for example from a load balancer while the server is down
                        reply.raise_for_status()
                    result = await _result(reply)
                answered = time.monotonic()
                if result.status != RunStatus.RUNNING:
                    return result
            except aiohttp.ClientError:
                if time.monotonic() - answered > AWAY_SECONDS:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)

    async def _end(self, run_id: str) -> None:
        """Cancel the trial at the server."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, TrialLost):
            timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http,
                http.delete(f"{self._url}{PATH}/{run_id}") as reply,
            ):
                await reply.read()

    @property
    def _where(self) -> str:
        """Return the URL without a possible key."""
        scheme, _, rest = self._url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


async def _result(reply: aiohttp.ClientResponse) -> RunResult:
    text = await reply.text()
    if reply.status not in (200, 202):
        raise TrialLost("HarborRefused", f"HTTP {reply.status}: {text[:SHOWN]}")
    try:
        return RunResult.model_validate_json(text)
    except ValidationError:
        raise TrialLost("HarborNonsense", f"the answer is not the result of a run: {text[:SHOWN]}") from None

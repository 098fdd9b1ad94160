"""A short test request, which shows whether a model that failed at one request answers another one."""

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from agent_runtime.models.answers import answered
from agent_runtime.models.base import (
    RATE_LIMITED,
    REQUESTS_OWN_FAULTS,
    ConversationRefused,
    Model,
    ModelError,
    ModelRequest,
)
from rollout_api.model import Sampling
from rollout_api.records import Message

PROBE_SECONDS: Final = 30.0
"""A loaded server answers a few tokens within this time. A server that does not is failing other requests too."""
PROBE_TOKENS: Final = 16  # OpenAI's reasoning models refuse a lower limit
_MESSAGES: Final[Sequence[Message]] = [{"role": "user", "content": "Say ok."}]


class ProbeResult(StrEnum):
    """What a model does with a test request."""

    ANSWERED = "Answered"
    REFUSED = "Refused"
    UNKNOWN = "Unknown"
    """It failed, took too long, or cannot be tested."""


@runtime_checkable
class SelfTesting(Protocol):
    """A `Model` whose calls are recorded or counted, so that it gets no test request as a call."""

    async def test(self, request: ModelRequest, *, may_record: bool) -> ProbeResult:
        """Return what the model does with this test request now. Without `may_record`, it is not sent where it would be
        recorded as a call.
        """


def probe_request(*, seed: int, session: str, task: str, member: int, group: str = "") -> ModelRequest:
    """Return a request without anything of the policy. `session` is that of a failed request, so that routers send it to
    the server that failed.
    """
    limit: dict[str, Any] = {"max_tokens": PROBE_TOKENS}
    return ModelRequest(
        messages=_MESSAGES,
        tools=[],
        sampling=Sampling(**limit),
        seed=seed,
        session=session,
        task=task,
        member=member,
        turn=0,
        group=group,
        **limit,
    )


async def is_answered(model: Model, request: ModelRequest) -> bool:
    """Whether the request is answered in time."""
    return await probed(model, request, may_record=True) is ProbeResult.ANSWERED


async def probed(model: Model, request: ModelRequest, *, may_record: bool) -> ProbeResult:
    """Send the request. Time on hold does not count, unless no server is available. If a server limits the rate, the model
    waits, within its own deadline, until the time that the server gives.
    """
    if isinstance(model, SelfTesting):
        return await model.test(request, may_record=may_record)
    now, health, left, is_held = asyncio.get_running_loop().time, request.health, PROBE_SECONDS, False
    try:
        async with asyncio.timeout(PROBE_SECONDS) as limit:

            def changed(held: bool) -> None:
                nonlocal left, is_held
                if limit.expired():
                    return
                if (end := limit.when()) is not None:
                    left = end - now()
                is_held = held
                waits = held if health.failing is None else health.failing.startswith(RATE_LIMITED)
                limit.reschedule(None if waits else now() + left)

            health.on_hold, health.on_failing = changed, lambda why: changed(is_held)
            await answered(model.complete(request))
    except ConversationRefused:
        return ProbeResult.REFUSED
    except ModelError as error:
        return ProbeResult.REFUSED if error.reason in REQUESTS_OWN_FAULTS else ProbeResult.UNKNOWN
    except TimeoutError:
        return ProbeResult.UNKNOWN
    return ProbeResult.ANSWERED

"""JSON requests of the gateway itself: to its engine, and to the trainer's hook."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import aiohttp
from pydantic import Field, StringConstraints

from rollout_api.base import ApiModel
from rollout_api.inference.description import Description, Request, version_text
from rollout_api.nesting import json_object

MOST_CHECKSUMS: Final = 64 * 2**20
"""Most bytes. Checksums of a model with 100,000 tensors take some 16 MB."""
MOST_HOOK_ANSWER: Final = 16 * 2**20
"""Most bytes. Names, types and shapes of 100,000 tensors take some 9 MB; the operator has the same limit."""
MOST_ANSWER: Final = 2**20
"""Most bytes of another answer of the engine."""
ERROR_CHARACTERS: Final = 500


class CallFailed(Exception):
    """A request got no response, a refusal, or a response that is not a JSON object."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        """Names the URL and the response."""
        self.status = status
        """HTTP status of a refusal; 0: no usable response."""


class HookRequest(ApiModel):
    """Body of POST /policy/hook."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://", max_length=2048)]
    """`weightTransfer.push.hook`."""
    question: dict[str, Any]
    """Body of the request to the hook."""
    seconds: Annotated[float, Field(gt=0)]
    """Time limit of its response."""


async def weights_digest(http: aiohttp.ClientSession, engine_url: str, described: Description) -> str:
    """Return a SHA-256 over an engine's checksums of its weights. Raises CallFailed; engines without checksums answer
    404.
    """
    asked = described.updates.checksums
    url = engine_url + asked.path
    answer = await _ask(http, asked.method, url, asked.body or {}, MOST_CHECKSUMS, None)
    checksums = described.updates.read_checksums(_object(f"{asked.method} {url}", answer))
    if checksums is None:
        oldest = version_text(described.supports_updates)
        raise CallFailed(f"POST {url} returned no checksums; {described.type} {oldest} or newer is required")
    return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()


async def ask_hook(http: aiohttp.ClientSession, asked: HookRequest) -> dict[str, Any]:
    """Call the trainer's hook; return its response. Raises CallFailed."""
    try:
        answer = await _ask(http, "POST", asked.url, asked.question, MOST_HOOK_ANSWER, asked.seconds)
        return _object(f"POST {asked.url}", answer)
    except CallFailed as error:
        raise CallFailed(f"weightTransfer.push.hook: {error.message}", error.status) from error


async def send(http: aiohttp.ClientSession, engine_url: str, request: Request) -> None:
    """Send a request to an engine. Raises CallFailed."""
    await _ask(http, request.method, engine_url + request.path, request.body, MOST_ANSWER, request.seconds)


async def models(http: aiohttp.ClientSession, engine_url: str) -> list[dict[str, Any]]:
    """Return the entries of an engine's GET /v1/models. Raises CallFailed."""
    url = f"{engine_url}/v1/models"
    listed = _object(f"GET {url}", await _ask(http, "GET", url, None, MOST_ANSWER, None)).get("data")
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, most: int, seconds: float | None
) -> bytes:
    what = f"{method} {url}"
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=http.timeout.sock_connect)
    # The session does not decompress responses.
    headers = {"Accept-Encoding": "identity"}
    data = bytearray()
    try:
        async with http.request(
            method, url, json=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > most:
                    raise CallFailed(f"{what} answered more than {most} bytes")
    except TimeoutError as error:
        raise CallFailed(f"{what} did not answer within {seconds:.0f} s") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:
        raise CallFailed(f"{what} cannot be reached: {error}") from error
    if response.status >= 300:
        words = " ".join(data[:ERROR_CHARACTERS].decode(errors="replace").split())
        raise CallFailed(f"{what} answered {response.status}: {words or response.reason}", response.status)
    return bytes(data)


def _object(what: str, data: bytes) -> dict[str, Any]:
    try:
        return json_object(data)
    except ValueError as error:
        raise CallFailed(f"{what} answered with {error}") from error

"""The form in which an inference server is described. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

Release = tuple[int, ...]
"""The first parts of a version, for comparisons."""
Route = tuple[str, str]
"""Method and path, compared without decoding, so that no encoded path can match another one."""


class EngineType(StrEnum):
    """`vLLM`, or `SGLang` (docs/model-servers.md has the differences)."""

    VLLM = "vLLM"
    SGLANG = "SGLang"


@dataclass(frozen=True)
class Request:
    """A request to an inference server."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] | None = None
    seconds: float | None = None
    """Time limit; None: the caller's own."""
    also: tuple[int, ...] = ()
    """Statuses besides success that are an answer and no failure."""


@dataclass(frozen=True)
class Answer:
    """A server's answer. `body` is empty unless the answer is a JSON object."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """Names in Prometheus' format, without the prefix."""

    prefix: str
    kv_cache_usage: str
    """Used part of the key-value cache, from 0 to 1."""
    waiting: str
    """Requests that wait to be scheduled, of all clients."""
    progress: tuple[str, ...]
    """Counters of which one increases while the server works, also on a long prompt."""
    totals: str = ""
    """Label of the lines that count; lines without it are parts of those."""


LORA_SECONDS: Final = 120.0
"""Time limit for loading a LoRA adapter, as in prime-rl (src/prime_rl/utils/client.py). A load takes seconds."""


@dataclass(frozen=True)
class Adapters:
    """Loading and unloading of LoRA adapters while the server runs."""

    load: Callable[[str, str], Request]
    """Load an adapter under a new name from a folder."""
    unload: Callable[[str], Request]
    choose: Callable[[dict[str, Any], str | None], None]
    """Make the body of a call name an adapter of that name; None: the model without one."""


@dataclass(frozen=True)
class Transfer:
    """Receiving tensors from a trainer."""

    init: Callable[[Mapping[str, Any]], Request]
    """`initInfo` of the trainer's hook."""
    leave: Request
    """Leave the trainer's group that `init` joined, if any. A server with a status of `also` does not have the request."""
    start: Request
    update: Callable[[Mapping[str, Any]], Request]
    """An entry of `updates` of the trainer's hook."""
    cancel: Request
    """End an unfinished transfer, after which `start` succeeds."""
    finish: Callable[[str], Request]
    """Finish, and set the name of the weights."""


@dataclass(frozen=True)
class Sleep:
    """Releasing the accelerators' memory. All requests are safe to repeat."""

    sleep: Request
    """Pause all requests in progress, and release the memory. What they have computed is computed again later."""
    wake: Request
    """Take back the memory of the weights."""
    resume: Request
    """Take back the rest, before the requests go on."""


@dataclass(frozen=True)
class Updates:
    """The requests of a policy update. All are safe to repeat."""

    paused: Request
    is_paused: Callable[[Answer], bool | None]
    """None: the answer is unusable."""
    weights: Request
    weights_name: Callable[[Answer], str | None]
    """Name of the loaded weights. None: the server has no name for them. Raises KeyError for an unusable answer."""
    pause: Request
    """Pause all requests in progress, which `resume` continues."""
    resume: Request
    abort: Request
    """Abort all requests in progress."""
    name_weights: Callable[[str], Request]
    """Set the name of the weights."""
    reload: Callable[[str, float], Request]
    """Load weights from a folder, within seconds."""
    checksums: Request
    read_checksums: Callable[[Mapping[str, Any]], Any]
    """Checksums of the weights as JSON. None: the answer has none."""
    adapters: Adapters
    survives_bad_weights: bool = True
    """Whether the server continues with its weights if it cannot load others."""
    transfer: Transfer | None = None
    sleep: Sleep | None = None


@dataclass(frozen=True)
class Routes:
    """Routes that a gateway forwards. All others get 404, also those of later versions, until they are reviewed."""

    data: frozenset[Route]
    """For runners, whose requests do not affect each other."""
    sampling: frozenset[Route]
    """Those of `data` whose answers depend on the policy."""
    control: frozenset[Route]
    """For the operator, which may change the server."""
    changes: frozenset[Route]
    """Those of `control` after which calls are refused until the policy and the health are verified again."""


OPERATORS: Final = "the operator sets it"


@dataclass(frozen=True)
class Description:
    """One inference server."""

    type: EngineType
    oldest: Release
    """Oldest supported version."""
    supports_updates: Release
    """First version with policy updates."""
    fields_of_flags: Mapping[str, tuple[str, ...]]
    """Flags that a field of the ModelServer decides."""
    operators_flags: tuple[str, ...]
    """Flags that the operator decides."""
    unsupported: Mapping[str, str]
    """Values of a ModelServer's fields that cannot be used, and why: the end of an error message."""
    metrics: Metrics
    updates: Updates
    routes: Routes

    @property
    def owned_flags(self) -> dict[str, str]:
        """Return the flags that `extraArgs` may not contain, each with the end of its error message."""
        owned = {flag: f"use {field}" for field, flags in self.fields_of_flags.items() for flag in flags}
        return owned | dict.fromkeys(self.operators_flags, OPERATORS)


def version_text(release: Release) -> str:
    return ".".join(map(str, release))


def read_only(*paths: str) -> frozenset[Route]:
    return frozenset(("GET", path) for path in paths)


def posts(*paths: str) -> frozenset[Route]:
    return frozenset(("POST", path) for path in paths)

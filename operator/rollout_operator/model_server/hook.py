"""What a trainer's hook answers: the requests with which each server receives its tensors.

The answer is held until the tensors have arrived, for all of `weightTransfer.push.timeoutSeconds`. So the requests are kept
as JSON text, which takes a tenth of the memory of parsed values, and servers share the common ones.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.inference.description import Request
from rollout_api.inference.description import Transfer as Requests

_REFERENCE_BYTES = 8


class HookProblem(ValueError):
    """An answer that cannot be used."""


@dataclass(frozen=True)
class Transfer:
    """Bodies of the requests to one server, as JSON."""

    init: bytes | None
    """Of the request that initializes the engine; None if it is initialized already."""
    updates: tuple[bytes, ...]
    """Of the request for each part of the tensors, in order."""


def read_hook_answer(
    answer: Mapping[str, Any], requests: Requests, servers: Collection[str], most: int
) -> tuple[dict[str, Transfer], int]:
    """Return what each of `servers` receives, and the bytes that all of it takes. Raises HookProblem, also beyond `most`
    bytes.

    The answer is `{"initInfo"?, "updates": [...], "servers"?: {name: {"initInfo"?, "updates"?}}}`. The fields of a server's
    entry replace the common ones.
    """
    entries = answer.get("servers", {})
    if not isinstance(entries, dict):
        raise HookProblem(f"`servers` has type {type(entries).__name__}; expected an object")
    for entry in (answer, *entries.values()):
        _check(entry)
    if not any(entry.get("updates") for entry in (answer, *entries.values())):
        raise HookProblem("expected `updates`, a list with the update_info of each call of /update_weights")
    bodies = _Bodies(requests, most)
    common = Transfer(bodies.init(answer.get("initInfo")), bodies.updates(answer.get("updates")))
    found = {}
    for name in servers:
        own = entries.get(name, {})
        found[name] = Transfer(
            bodies.init(own["initInfo"]) if "initInfo" in own else common.init,
            bodies.updates(own["updates"]) if "updates" in own else common.updates,
        )
    return found, bodies.size


def _check(entry: Any) -> None:
    if not isinstance(entry, dict):
        raise HookProblem(f"an entry of `servers` has type {type(entry).__name__}; expected an object")
    init, updates = entry.get("initInfo"), entry.get("updates")
    if not isinstance(init, dict | None):
        raise HookProblem(f"`initInfo` has type {type(init).__name__}; expected an object")
    if not isinstance(updates, list | None):
        raise HookProblem(f"`updates` has type {type(updates).__name__}; expected a list")
    for update in updates or ():
        if not isinstance(update, dict):
            raise HookProblem(f"an entry of `updates` has type {type(update).__name__}; expected an object")


class _Bodies:
    """Serializes bodies, and adds up their bytes."""

    def __init__(self, requests: Requests, most: int) -> None:
        self._requests, self._most = requests, most
        self.size = 0

    def init(self, info: Mapping[str, Any] | None) -> bytes | None:
        return None if info is None else self._body(self._requests.init(info))

    def updates(self, infos: Sequence[Mapping[str, Any]] | None) -> tuple[bytes, ...]:
        return tuple(self._body(self._requests.update(info)) for info in infos or ())

    def _body(self, request: Request) -> bytes:
        body = json.dumps(request.body, separators=(",", ":")).encode()
        self.size += sys.getsizeof(body) + _REFERENCE_BYTES
        if self.size > self._most:
            raise HookProblem("its requests take more than twice its bytes; send fewer and larger `updates`")
        return body

"""The weights: which version is really loaded, what the server says about it, and how it changes.

"Weights" are a JSON file {"version": N}, or a folder with such a file, `version.json` first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.vllm_server import transfer
from tests.support.vllm_server.faults import Faults

# What vLLM says until a label is set: vLLM, docs/serving/online_serving/token_in_token_out.md, "Weight versions".
UNLABELLED = "default"
# Made from weights that were thrown away by a sleep of level 2 and not loaded again.
DISCARDED = -1
CHECKED_TENSORS = ("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight")


class LoadError(RuntimeError):
    """Weights could not be loaded."""


@dataclass
class Adapter:
    """A LoRA adapter."""

    path: str
    version: int


@dataclass
class Weights:
    """Changed only by its methods. `version` is the real version, `label` what the server reports."""

    base: int
    load_seconds: float
    faults: Faults
    version: int = 0
    label: str = UNLABELLED
    adapters: dict[str, Adapter] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)
    """Every attempted load: {how, version, ok}."""
    begun: int = 0
    """Number of loads that have begun."""
    initialised: bool = False
    """Whether the channel to a trainer exists."""
    updating: bool = False
    """Whether an update is between start_weight_update and finish_weight_update."""
    tensors: int | None = None
    """Version that the trainer has sent last. POST /_standin/tensors acts as the trainer's channel."""
    transfer_port: int = 0
    """Port for tensors if the trainer's channel is a real one; 0: any."""
    path: str | None = None
    """Path of the last reload; None: the path with which the server was started."""
    _channel: transfer.Channel | None = None
    _received: bool = False

    def __post_init__(self) -> None:
        self.version = self.base

    async def reload(self, path: str | None) -> None:
        """Load from a path, or from the last one again. Raises LoadError.

        vLLM 0.32, vllm/model_executor/model_loader/reload/inplace.py: a path replaces the model's own.
        """
        self.path = path or self.path
        version = self.base if self.path is None else await asyncio.to_thread(version_at, self.path)
        await self._load("reload_weights", version)
        self.version = version

    async def join(self, init_info: Mapping[str, Any]) -> None:
        """Prepare for tensors; join the group if it has a port, which means that it is a real one. Raises LoadError."""
        if self._channel is not None:
            # vLLM itself keeps the old group, and NCCL fails in some cases (vLLM pull request 40646).
            raise LoadError("unhandled cuda error: the engine has not left its last group")
        if "master_port" in init_info:
            try:
                self._channel = await transfer.join(init_info, self.transfer_port)
            except transfer.TransferError as error:
                raise LoadError(str(error)) from error
        self.initialised = True

    def leave(self) -> None:
        """Leave the trainer's group, if any. Raises LoadError."""
        if self.updating:
            raise LoadError("Cannot release a trainer connection during a weight update")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.initialised = False

    async def receive(self, update: Mapping[str, Any]) -> None:
        """Receive one part of an update, over the trainer's own channel. Raises LoadError."""
        if not self.updating:
            raise LoadError("start_weight_update must be called before update_weights.")
        if "path" not in update and not self.initialised:
            raise LoadError("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        if "path" in update:
            self.tensors = await asyncio.to_thread(version_at, str(update["path"]))
        names = update.get("names", [])
        for fields in ("dtype_names", "shapes"):
            if len(update.get(fields, names)) != len(names):
                raise LoadError(
                    f"`{fields}` should be of the same size as `names`: got {len(update[fields])} and {len(names)}"
                )
        if self._channel is not None:
            try:
                self.tensors = await self._channel.receive(update.get("dtype_names", []), update.get("shapes", []))
            except transfer.TransferError as error:
                raise LoadError(str(error)) from error
        await self._load("update_weights", self.tensors)
        self._received = True

    def start(self) -> None:
        """Begin an update. Raises LoadError."""
        if self.updating:
            raise LoadError("A weight update is already in progress.")
        self.updating, self._received = True, False

    def finish(self, label: str | None) -> None:
        """Use the received weights for further tokens. Raises LoadError."""
        if not self.updating:
            raise LoadError("start_weight_update must be called before finish_weight_update.")
        self.updating = False
        if self._received:
            if self.tensors is not None:
                self.version = self.tensors
            elif label is not None and label.isdigit():
                self.version = int(label)
        self.tensors = None
        if label is not None:
            self.label = label

    async def add_adapter(self, name: str, path: str) -> None:
        """Load or replace a LoRA adapter. Raises LoadError."""
        version = await asyncio.to_thread(version_at, path)
        await self._load("load_lora_adapter", version)
        self.adapters[name] = Adapter(path, version)

    def discard(self) -> None:
        """Discard the weights. Further tokens have no version until weights are loaded."""
        self.version = DISCARDED

    def version_for(self, adapter: str | None) -> int:
        """Return the version that samples the tokens of a request."""
        found = self.adapters.get(adapter) if adapter else None
        return found.version if found else self.version

    def checksums(self) -> dict[str, str]:
        """Return the checksums of the weights that are really loaded."""
        return checksums_of(self.version)

    async def _load(self, how: str, version: int | None) -> None:
        self.begun += 1
        await asyncio.sleep(self.load_seconds)
        while self.faults.load_hangs:  # noqa: ASYNC110 - tests set the field itself
            await asyncio.sleep(0.02)
        failed = self.faults.load_failures > 0
        self.loads.append({"how": how, "version": version, "ok": not failed})
        if failed:
            self.faults.load_failures -= 1
            raise LoadError("CUDA out of memory while loading weights (a fault on demand)")


def checksums_of(version: int) -> dict[str, str]:
    """Return /weight_checker's answer for a version, by name of tensor."""
    return {name: hashlib.sha256(f"{name} {version}".encode()).hexdigest() for name in CHECKED_TENSORS}


def version_at(path: str) -> int:
    """Return the version of the weights at a path. Raises LoadError."""
    place = Path(path)
    files = [place] if place.is_file() else [place / "version.json", *sorted(place.glob("*.json"))]
    for file in files:
        try:
            return int(json.loads(file.read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise LoadError(f"No weights found at {path}")

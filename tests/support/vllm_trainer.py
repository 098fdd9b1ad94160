"""The trainer of docs/weight-push.md, with vLLM's own trainer engine: `vllm_trainer.py HOOK_PORT GROUP_PORT`. It runs in
vLLM's environment.

There is no GPU, so the group and the broadcast are those of the stand-in (vllm_server/transfer.py) instead of NCCL's.
"""

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_engine

from tests.support.documentation import blocks

PAGE = Path(__file__).parents[2] / "docs" / "weight-push.md"


class Group:
    """Connections to all members of the trainer's group."""

    def __init__(self, info: nccl_engine.NCCLTrainerInitInfo) -> None:
        self._members: dict[int, socket.socket] = {}
        with socket.create_server((info.master_address, info.master_port)) as server:
            for _ in range(info.world_size - 1):
                member, _ = server.accept()
                with member, member.makefile() as lines:
                    joined = json.loads(lines.readline())
                self._members[joined["rank"]] = socket.create_connection(tuple(joined["address"]))
        assert sorted(self._members) == list(range(1, info.world_size))

    def send(self, tensor: torch.Tensor) -> None:
        for member in self._members.values():
            member.sendall(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def destroy(self) -> None:
        for member in self._members.values():
            member.close()


def broadcast(engine: Any, source: Any, metadata: Sequence[Any]) -> None:
    """Take the place of the engine's `_broadcast`."""
    for _, tensor in engine._checked_iter(source, metadata):
        engine.model_update_group.send(tensor)


def module_of(version: int) -> torch.nn.Module:
    """Return a module whose tensors are those of the stand-in's version."""
    module = torch.nn.Module()
    for name, dtype in (("embed", torch.bfloat16), ("head", torch.float32)):
        tensor = torch.full((8, 16), version).view(dtype)
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def main() -> None:
    """Serve until killed."""
    vars(nccl_engine)["open_trainer_endpoint"] = Group
    vars(nccl_engine)["NCCLTrainerWeightTransferEngine"]._broadcast = broadcast
    (block,) = (block for block in blocks(PAGE) if block.needs == "vLLM")
    names: dict[str, Any] = {}
    exec(compile(block.text, str(PAGE), "exec"), names)
    names["serve_weights"](module_of, "127.0.0.1", int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()

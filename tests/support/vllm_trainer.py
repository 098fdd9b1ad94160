"""The trainer of docs/weight-push.md, with vLLM's own trainer engine: `vllm_trainer.py HOOK_PORT GROUP_PORT [FOLDER]`. It
runs in vLLM's environment, and has versions 0 to 2 or those of FOLDER (tiny_llama.py).

There is no GPU. With FOLDER it sends to vLLM itself, by what takes NCCL's place there too (without_gpu). Otherwise it
sends to stand-ins (vllm_server/transfer.py).
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.documentation import blocks
from tests.support.without_gpu import sitecustomize  # noqa: F401, before vLLM

# isort: split
from vllm.distributed.weight_transfer import nccl_common

PAGE = Path(__file__).parents[2] / "docs" / "weight-push.md"


class StandInGroup:
    """Connections to all members of a group of stand-ins."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: Any) -> None:
        self._members: dict[int, socket.socket] = {}
        with socket.create_server((address, port)) as server:
            for _ in range(world_size - 1):
                member, _ = server.accept()
                with member, member.makefile() as lines:
                    joined = json.loads(lines.readline())
                self._members[joined["rank"]] = socket.create_connection(tuple(joined["address"]))
        assert sorted(self._members) == list(range(1, world_size))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        for member in self._members.values():
            member.sendall(tensor.numpy().tobytes())

    def destroy(self) -> None:
        for member in self._members.values():
            member.close()


def stand_in_module(version: int) -> torch.nn.Module | None:
    """Return a module whose tensors are those of the stand-in's version."""
    if version > 2:
        return None
    module = torch.nn.Module()
    for name, dtype in (("embed", torch.bfloat16), ("head", torch.float32)):
        tensor = torch.full((8, 16), version).view(dtype)
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def main() -> None:
    """Serve until killed."""
    hook, group, *folders = sys.argv[1:]

    def saved_module(version: int) -> Any:
        folder = Path(folders[0]) / str(version)
        return AutoModelForCausalLM.from_pretrained(folder) if folder.exists() else None

    if not folders:
        vars(nccl_common)["stateless_init_process_group"] = StandInGroup
    (block,) = (block for block in blocks(PAGE) if block.needs == "vLLM")
    names: dict[str, Any] = {}
    exec(compile(block.text, str(PAGE), "exec"), names)
    names["serve_weights"](saved_module if folders else stand_in_module, "127.0.0.1", int(hook), int(group))


if __name__ == "__main__":
    main()

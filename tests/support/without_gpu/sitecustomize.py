"""Lets vLLM and SGLang do without a GPU what they otherwise need one for, in processes with this folder in PYTHONPATH.

- vLLM 0.32 reports routed experts only with its second model runner, whose kernels are Triton's (vllm/config/vllm.py:
  _verify_aux_output_compatibility, _validate_v2_model_runner). Triton has no compiler for CPUs on PyPI, but it has an
  interpreter. vLLM's CPU build asks for a backend `cpu` before it uses Triton at all (vllm/triton_utils/importing.py).
- vLLM 0.32 receives weights of a trainer by NCCL (vllm/distributed/weight_transfer), on streams of CUDA.
- SGLang 0.5.23 keeps routed experts in memory that CUDA has registered (srt/mem_cache/pool_host/common.py:
  ALLOC_MEMORY_FUNCS), and pins the memory of LoRA adapters (srt/lora).
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class Driver:
    """Triton's own choice of a driver leaves it out."""

    @staticmethod
    def is_active() -> bool:
        return False


def interpret_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        backends: dict[str, Any] = importlib.import_module("triton.backends").backends
        any_backend = next(iter(backends.values()))
        backends.setdefault("cpu", type(any_backend)(compiler=any_backend.compiler, driver=Driver))


class Changes(importlib.abc.MetaPathFinder):
    """Changes a module of vLLM or SGLang when it is imported."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def changed(module: types.ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


class Communicator:
    """Takes the place of NCCL's: a broadcast goes through the store at which the processes of the group have met."""

    def __init__(self, group: Any, device: Any) -> None:
        self._group = group

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self) -> None:
        del self._group


def communicate_without_nccl(module: types.ModuleType) -> None:
    module.PyNcclCommunicator = Communicator  # type: ignore[attr-defined]


class Stream:
    """One on which all work is done."""

    def synchronize(self) -> None:
        """Return at once."""


def pack_without_streams(module: types.ModuleType) -> None:
    module._get_streams = lambda device, count: (Stream(),) * count  # type: ignore[attr-defined]
    module.torch.accelerator.current_device_index = lambda: 0
    module.torch.accelerator.synchronize = lambda *_: None


def register_no_memory(module: types.ModuleType) -> None:
    def allocate(dims: Any, dtype: Any, device: str, pin_memory: Any, allocator: Any, *_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def pin_no_memory(module: types.ModuleType) -> None:
    torch = module.torch
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def unpinned(make: Any) -> Any:
    def made(*arguments: Any, **fields: Any) -> Any:
        fields.pop("pin_memory", None)
        return make(*arguments, **fields)

    return made


interpret_triton()
sys.meta_path[:0] = [
    Changes("vllm.distributed.device_communicators.pynccl", communicate_without_nccl),
    Changes("vllm.distributed.weight_transfer.packed_tensor", pack_without_streams),
    Changes("sglang.srt.mem_cache.pool_host.common", register_no_memory),
    Changes("sglang.srt.lora.layers", pin_no_memory),
]

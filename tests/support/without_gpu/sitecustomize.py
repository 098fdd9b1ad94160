"""Lets vLLM and SGLang report routed experts without a GPU, in processes with this folder in PYTHONPATH.

- vLLM 0.32 reports them only with its second model runner, whose kernels are Triton's (vllm/config/vllm.py:
  _verify_aux_output_compatibility, _validate_v2_model_runner). Triton has no compiler for CPUs on PyPI, but it has an
  interpreter. vLLM's CPU build asks for a backend `cpu` before it uses Triton at all (vllm/triton_utils/importing.py).
- SGLang 0.5.23 keeps them in memory that CUDA has registered (srt/mem_cache/pool_host/common.py: ALLOC_MEMORY_FUNCS).
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

SGLANG_MEMORY = "sglang.srt.mem_cache.pool_host.common"


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


class UnregisteredMemory(importlib.abc.MetaPathFinder):
    """Changes SGLang's module when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != SGLANG_MEMORY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def changed(module: types.ModuleType) -> None:
            execute(module)
            module.ALLOC_MEMORY_FUNCS["cpu"] = allocate

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


interpret_triton()
sys.meta_path.insert(0, UnregisteredMemory())

"""Replaces SGLang's compiled kernels, of which PyPI has no build for the CPU: `hack/sglang-environment` installs it.

With `--attention-backend torch_native` and `--sampling-backend pytorch`, SGLang computes a Llama in plain torch if the
processor lacks AMX, but it still imports its kernels. Every name can be imported from this module, and none can be
called.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__path__: list[str] = []
ABSENT = ("sgl_kernel.scalar_type",)
"""Modules that SGLang itself replaces."""


class Kernels(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is a compiled kernel of SGLang, which is not installed")

        return absent


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel.") or fullname in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


if __name__ == "sgl_kernel":
    sys.meta_path.insert(0, Finder())
    sys.modules[__name__].__class__ = Kernels

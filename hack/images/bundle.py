"""Writes a Python that runs in any Linux root file system into a folder: `bundle.py OUT PACKAGE`, run by the Dockerfile.

    bin/python3           the interpreter of the base image
    lib/loader            its ELF loader, under a name that is the same for all architectures
    lib/*.so*             the shared objects that interpreter and extension modules need
    lib/pythonX.Y/        PACKAGE and the part of the standard library that it imports, compiled, including C files

The working folder must hold PACKAGE.
"""

from __future__ import annotations

import importlib.machinery
import os
import py_compile
import re
import shutil
import subprocess
import sys
from modulefinder import ModuleFinder
from pathlib import Path

# Optional imports of standard modules that the executor never uses. TLS alone would add 7 MB.
UNUSED = [
    "ssl", "_ssl", "_hashlib", "multiprocessing", "decimal", "email", "doctest", "pdb", "pydoc", "unittest", "test", "xml",
    "bz2", "lzma", "csv", "argparse", "readline",
]  # fmt: skip
# Loaded by name when text is encoded, so no import statement names them. idna: host names; unicode_escape: mountinfo.
CODECS = ["ascii", "idna", "latin_1", "unicode_escape", "utf_8"]
# libc loads it with dlopen when a thread ends early, so no program lists it.
LIBGCC = "libgcc_s.so.1"
# The image's list of libraries that are loaded into every program; this program must not load them.
PRELOAD_FILE = b"/etc/ld.so.preload\0"


def imported_modules(package: str) -> dict[str, Path]:
    """Returns the file of every module that `package` may import, itself included."""
    finder = ModuleFinder(path=[os.getcwd(), *(path for path in sys.path if "-packages" not in path)], excludes=UNUSED)
    for file in sorted(Path(package.replace(".", "/")).rglob("*.py")):
        finder.import_hook(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    for codec in CODECS:
        finder.import_hook(f"encodings.{codec}")
    # Modules that the interpreter itself imports at the start.
    for name in ("os", "io", "codecs", "warnings"):
        finder.import_hook(name)
    files = {name: getattr(module, "__file__", None) for name, module in finder.modules.items()}
    return {name: Path(file) for name, file in files.items() if file}


def needed_libraries(program: Path) -> dict[str, Path]:
    """Returns the shared objects of a program by the names under which they are loaded; the ELF loader's name is an
    absolute path.
    """
    listing = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    named = re.findall(r"^\s*(\S+) => (/\S+) \(", listing, re.MULTILINE)
    loader = re.findall(r"^\s*(/\S+) \(", listing, re.MULTILINE)
    return {name: Path(path) for name, path in named} | {path: Path(path) for path in loader}


def copy_modules(modules: dict[str, Path], library: Path) -> list[Path]:
    """Compiles or copies the modules below `library`; returns the shared objects among them."""
    extensions = []
    for name, source in modules.items():
        place = library / name.replace(".", "/")
        if source.suffix == ".so":
            target = library / "lib-dynload" / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            extensions.append(target)
            continue
        if source.name == "__init__.py":
            place /= "__init__"
        target = place.with_suffix(importlib.machinery.BYTECODE_SUFFIXES[0])
        shown = f"<bundle>/{target.relative_to(library).with_suffix('.py')}"
        # The bundle has no source that the compiled file could be compared with.
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), str(target), shown, doraise=True, invalidation_mode=unchecked)
    # The interpreter finds its prefix by the existence of this folder.
    (library / "lib-dynload").mkdir(parents=True, exist_ok=True)
    return extensions


def compile_c(package: str, library: Path) -> list[Path]:
    """Compiles each C file of `package` into a shared object beside its modules."""
    objects = []
    for source in sorted(Path(package.replace(".", "/")).rglob("*.c")):
        target = (library / source).with_suffix(".so")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", target, source], check=True
        )
        objects.append(target)
    return objects


def copy_libraries(programs: list[Path], folder: Path) -> None:
    """Copies the shared objects of `programs`, and the ELF loader, changed so that it reads no list of libraries to
    preload.
    """
    needed = {name: path for program in programs for name, path in needed_libraries(program).items()}
    libc = next(path for name, path in needed.items() if name.startswith("libc.so"))
    for name, path in needed.items():
        if not name.startswith("/"):
            shutil.copy(path, folder / name)
            continue
        loader = path.read_bytes()
        if loader.count(PRELOAD_FILE) != 1:
            sys.exit(f"{path}: expected glibc's loader, with {PRELOAD_FILE!r} exactly once; use a Debian base image")
        (folder / "loader").write_bytes(loader.replace(PRELOAD_FILE, bytes(len(PRELOAD_FILE))))
        (folder / "loader").chmod(0o755)
    shutil.copy(libc.parent / LIBGCC, folder / LIBGCC)


def main(out: Path, package: str) -> None:
    library = out / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = out / "bin" / "python3"
    python.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), python)
    extensions = copy_modules(imported_modules(package), library) + compile_c(package, library)
    copy_libraries([python, *extensions], out / "lib")
    for file in [python, *extensions, *(out / "lib").glob("*.so*")]:
        subprocess.run(["strip", "--strip-unneeded", file], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

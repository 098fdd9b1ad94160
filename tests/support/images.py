"""Images that tests unpack or create: small ones, of programs compiled here for any libc or none."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cluster import REPOSITORY

OnNodes = Callable[[str], str]
"""Fixture `on_nodes` of tests/e2e/cluster."""

SAYS_HELLO = """
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    printf("hello %s %s\\n", count > 1 ? words[1] : "", getenv("OF_THE_IMAGE"));
    return 3;
}
"""


def require_compilers() -> None:
    """Fail with the names of missing programs, so that untested code is noticed."""
    assert os.geteuid() == 0, "images are made and unpacked by root; run these tests as root"
    missing = [program for program in ("busybox", "gcc", "musl-gcc") if not shutil.which(program)]
    assert not missing, f"{', '.join(missing)}: missing; run hack/install-test-tools"


def compile_c(code: str, place: Path, *options: str, compiler: str = "gcc") -> Path:
    """Compile a program, or with `-shared` a library."""
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-O1", "-x", "c", *options, "-o", place, "-"], input=code, text=True, check=True)
    return place


def compile_for_musl(code: str, place: Path) -> str:
    """Compile a program for musl; return the path of the loader that it needs, which contains all of musl."""
    compile_c(code, place, compiler="musl-gcc")
    program = subprocess.run(["readelf", "-l", place], stdout=subprocess.PIPE, text=True, check=True).stdout
    loader = program.partition("program interpreter: ")[2].partition("]")[0]
    assert "musl" in loader
    return loader


def busybox() -> Path:
    """Return the path of a static busybox: a shell and small tools."""
    return Path(str(shutil.which("busybox")))


def build(*targets: str) -> list[Path]:
    """Return the archives of the product's images."""
    made = subprocess.run([REPOSITORY / "hack/images/build", *targets], stdout=subprocess.PIPE, text=True, check=True)
    return [Path(line) for line in made.stdout.split()]


def unpack(archive: Path, workshop: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return an image's layers, the lowest first, and its configuration. Each layer is unpacked once for all images."""

    def read(name: str) -> Any:
        return json.loads(subprocess.run(["tar", "-xOf", archive, name], stdout=subprocess.PIPE, check=True).stdout)

    (manifest,) = read("manifest.json")
    folders = [workshop / "layers" / layer.removesuffix(".tar") for layer in manifest["Layers"]]
    for layer, folder in zip(manifest["Layers"], folders, strict=True):
        if not folder.exists():
            folder.mkdir(parents=True)
            command = 'set -o pipefail; tar -xOf "$1" "$2" | tar -x --numeric-owner -C "$3"'
            subprocess.run(["bash", "-ec", command, "-", archive, layer, folder], check=True)
    configuration: dict[str, Any] = read(manifest["Config"])["config"]
    return folders, configuration

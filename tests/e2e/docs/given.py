"""What a page requires of its reader in words, by the page's name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolloutctl.commands.init import init
from tests.support.harbor_tasks import hello_world
from tests.support.repository import make_repository

THIS_MACHINE = "agent-rollouts-quickstart"
"""The image that a laptop has without pulling one."""


def by_page(name: str, folder: Path) -> None:
    """Prepare the folder in which a page is typed."""
    if found := GIVEN.get(name):
        found(folder)


def first_manifest(folder: Path) -> None:
    """Write the manifest that `rolloutctl init` writes."""
    init(folder / "job.yaml")


def uploaded_task(folder: Path) -> None:
    """Write a task folder to upload, which needs no image."""
    hello_world(folder / "tasks" / "hello")
    (folder / "tasks" / "hello" / "environment" / "Dockerfile").unlink()


def data_sets(folder: Path) -> None:
    """Write two data sets: one with column names of its own, and one in SWE-bench's format."""
    rows = [
        {
            "id": f"q-{n}",
            "question": f"Write {n} into answer.txt.",
            "level": level,
            "check": [f"grep -qx {n} answer.txt"],
            "solution": [f"echo {n} > answer.txt"],
        }
        for n, level in enumerate(["easy", "hard", "very hard", "hard"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "questions.parquet")
    # Not below a checkout, whose settings pytest would find.
    instance = make_repository(folder.parent / "repository") | {"repo": "psf/calculator", "image": THIS_MACHINE}
    pq.write_table(pa.Table.from_pylist([instance]), folder / "swe-bench-verified.parquet")


def dockerfiles(folder: Path) -> None:
    """Write a task folder with a Dockerfile, and its base image as a folder."""
    hello_world(folder / "tasks" / "hello")
    programs = folder / "roots/debian/bin"
    programs.mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), programs)
    # Debian's busybox has no bash.
    (programs / "bash").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    (programs / "bash").chmod(0o755)
    for program in ("sh", "env", "cat", "mkdir", "rm", "chmod", "cp", "wc", "grep", "echo", "test", "date"):
        (programs / program).symlink_to("busybox")
    for path in ("etc", "usr", "root"):
        (programs.parent / path).mkdir()
    (programs.parent / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")


def wrong_manifest(folder: Path) -> None:
    """Write a manifest with three mistakes."""
    (folder / "wrong.yaml").write_text(WRONG)


WRONG = """\
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: wrong}
spec:
  mode: Eval
  groupSize: "4"
  tasks:
    inline: [{name: hello, prompt: Say hello.}]
  maxTurns: 30
  model:
    endpoint: {baseURL: "http://127.0.0.1:8000/v1", name: my-model}
  output: {uri: out}
  sandbox:
    user: 1000
"""
GIVEN: dict[str, Callable[[Path], object]] = {
    "bringing-tasks": data_sets,
    "cli": first_manifest,
    "dockerfiles": dockerfiles,
    "remote-agents": uploaded_task,
    "manifest": wrong_manifest,
    "python": first_manifest,
}

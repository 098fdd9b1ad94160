"""One person's terminal in a folder, into which the blocks of a page are typed one after another."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rollout_api import manifest, rollout_job
from rollout_api.base import API_VERSION
from rollout_api.model_server import ModelServer
from rollout_api.sandbox import Sandbox
from tests.support.documentation import REPOSITORY, Block, commands, shows

KINDS: Mapping[str, type[BaseModel]] = {
    "ModelServer": ModelServer,
    "Sandbox": Sandbox,
    manifest.KIND: rollout_job.RolloutJob,
}
RUN_PYTHON = Path(__file__).with_name("run_python.py")
BLOCK_SECONDS = 300

PART_OF: dict[str, Any] = {
    "tasks": {"inline": [{"name": "task", "prompt": "Do it.", "verifier": {"commands": ["true"]}}]},
    "model": {"endpoint": {"baseURL": "http://127.0.0.1:8000/v1", "name": "my-model"}},
    "output": {"uri": "out"},
}
"""The rest of a job of which a page shows a part."""


@dataclass
class Terminal:
    """A folder, an environment that lasts from block to block, and the typed commands. Close it at the end."""

    folder: Path
    environ: Mapping[str, str]
    python: str = sys.executable
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Replacements for what a page names, such as the address of a model server."""
    _running: list[int] = field(default_factory=list)
    """Return the process groups that still run."""

    def run(self, block: Block) -> None:
        """Do with a block what a reader does. Raises AssertionError, with the block's place, if that fails."""
        if block.title:
            self.write(block)
        block = self._here(block)
        match block.language:
            case "sh":
                self._type(block, block.text)
            case "console":
                for typed, expected in commands(block):
                    output = self._type(block, typed)
                    assert shows(expected, output), f"{block.place}: {typed} wrote\n{output}\ninstead of\n{expected}"
            case "python":
                name = block.title or f"line_{block.line}.py"
                (self.folder / name).write_text(block.text)
                self._type(block, shlex.join([self.python, str(RUN_PYTHON), name]))
            case "yaml":
                check_yaml(block)
            case "json":
                json.loads(block.text)
            case "toml":
                self._check_toml(block)

    def write(self, block: Block) -> None:
        """Write the block as a file."""
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._here(block).text)

    def _here(self, block: Block) -> Block:
        text = block.text
        for named, here in self.stand_ins.items():
            text = text.replace(named, here)
        return replace(block, text=text)

    def _type(self, block: Block, text: str) -> str:
        """Type the text into a shell; return standard output and error together."""
        # A reader's variables are there in the next block too.
        kept = shlex.quote(str(self.folder / ".environment"))
        script = f"[ ! -e {kept} ] || . {kept}\ntrap 'export -p > {kept}' EXIT\nset -a\n{text}"
        log = self.folder / ".output"
        with log.open("w+b") as output:
            # Into a file: a program that a block leaves running would keep a pipe open.
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self.folder,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | str
            try:
                status = shell.wait(BLOCK_SECONDS)
            except subprocess.TimeoutExpired:
                status = f"nothing after {BLOCK_SECONDS} seconds"
            written = log.read_text(errors="replace")
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, 0)
            self._running.append(shell.pid)
        assert status == block.exit, f"{block.place}: ended with {status}, expected {block.exit}\n{text}\n{written}"
        return written

    def _check_toml(self, block: Block) -> None:
        """Check that the entry points of a package name existing objects."""
        for group in tomllib.loads(block.text).get("project", {}).get("entry-points", {}).values():
            for target in group.values():
                module, name = target.split(":")
                self._type(block, shlex.join([self.python, "-c", f"from {module} import {name}"]))

    def close(self) -> None:
        """End everything that the blocks left running."""
        for group in self._running:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)


def check_yaml(block: Block) -> None:
    """Check that a manifest is valid for a cluster; also a part of one: fields of a job's spec, or `spec`."""
    value = yaml.safe_load(block.text)
    kind = value.get("kind")
    if kind == manifest.KIND:
        manifest.load_manifest(block.text)
    elif kind in KINDS:
        manifest.validate(KINDS[kind], value)
    elif not block.title:
        job = {"apiVersion": API_VERSION, "kind": manifest.KIND, "metadata": {"name": "part"}}
        manifest.load_manifest(json.dumps(job | {"spec": PART_OF | value.get("spec", value)}))


def checkout(folder: Path) -> Path:
    """Create a folder with the content of a checkout, whose examples and environment can be written to."""
    folder.mkdir(exist_ok=True)
    for entry in REPOSITORY.iterdir():
        if entry.name == "examples":
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("out", "__pycache__"))
        elif entry.name not in (".git", ".venv", "build", "out"):
            (folder / entry.name).symlink_to(entry)
    # `make` installs again where its stamp is older than what it installs.
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "installed":
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv" / "installed").touch()
    return folder

"""The programs of catalog agents, and which of their settings a user may change."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_runtime.agents.catalog import CATALOG
from agent_runtime.agents.program import HOME, program_of
from rollout_api.rollout_job import CATALOG_AGENTS, Agent

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[3] / "docs" / "coding-agents.md"
VALUES = {
    "prompt": "Fix {model}.",
    "promptFile": "/tmp/p.md",
    "model": "org/model",
    "url": "http://127.0.0.1:9",
    "home": f"/root{HOME}",
}


def test_the_manifest_and_the_catalog_name_the_same_agents() -> None:
    assert tuple(CATALOG) == CATALOG_AGENTS


@pytest.mark.parametrize("kind", CATALOG_AGENTS)
def test_an_agent_of_the_catalog_becomes_the_reviewed_program(kind: str) -> None:
    program = program_of(Agent(type=kind, config={"arguments": ["--more", "{prompt}"]}), "/workspace")
    assert program is not None
    described = {
        **dataclasses.asdict(program.filled(VALUES)),
        "install": list(program.install),
        "search_path": program.search_path,
        "trajectory": program.trajectory and program.trajectory.wire(),
    }
    text = json.dumps(described, indent=2) + "\n"
    golden = GOLDEN / f"{kind}.json"
    if os.environ.get("ROLLOUT_GOLDEN") == "write":
        golden.write_text(text)
    assert golden.read_text() == text


@pytest.mark.parametrize("kind", CATALOG_AGENTS)
def test_the_documentation_names_the_version_of_each_agent(kind: str) -> None:
    package = CATALOG[kind].package
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind}` |"))
    assert f"{package.name} {package.version}" in row
    assert CATALOG[kind].protocol in row


def test_only_known_placeholders_of_a_command_are_replaced() -> None:
    command = ["agent", "--model={model}", "{prompt}", "{promptFile}", "{other} ${HOME} {} {home} {url}"]
    program = program_of(Agent(type="Command", command=command, install=["make"]), "/workspace")
    assert program is not None
    assert program.install == ["make"]
    filled = program.filled(VALUES)
    assert filled.command == [
        "agent", "--model=org/model", "Fix {model}.", "/tmp/p.md", "{other} ${HOME} {} {home} {url}",
    ]  # fmt: skip
    assert (filled.env, filled.files, filled.stdin) == ({}, {}, "")


@given(st.text(max_size=40))
def test_braces_in_a_prompt_are_not_replaced(prompt: str) -> None:
    text = f"{{model}}{prompt}{{promptFile}}"
    program = program_of(Agent(type="Command", command=["{prompt}|{prompt}"]), "/workspace")
    assert program is not None
    assert program.filled({**VALUES, "prompt": text}).command == [f"{text}|{text}"]


def test_a_value_in_a_configuration_file_cannot_end_its_string() -> None:
    program = program_of(Agent(type="Codex"), "/workspace")
    assert program is not None
    config = program.filled({**VALUES, "model": 'a"b\\c'}).files[f"{HOME}/.codex/config.toml"]
    assert 'model = "a\\"b\\\\c"\n' in config


def test_built_in_agent_has_no_program() -> None:
    assert program_of(Agent(type="ToolCalling"), "/workspace") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"config": {"version": "latest"}}, "config.version: expected an exact version such as 1.2.3, found 'latest'"),
        ({"config": {"version": "1.0; rm -rf /"}}, "config.version: expected an exact version"),
        ({"config": {"versions": "1"}}, "config.versions: unknown option; Codex has version and arguments"),
        ({"config": {"arguments": "--a"}}, "config.arguments: .*list.*found '--a'"),
        ({"command": ["codex"]}, "command is not for type Codex, .*config.arguments, or use type Command"),
        ({"install": ["npm i"]}, "install is not for type Codex, .*config.version, or use type Command"),
        ({"systemPrompt": "Be good."}, "systemPrompt is not for type Codex"),
        ({"trajectory": {"path": "a"}}, "trajectory is only for type Command"),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Agent.model_validate({"type": "Codex", **fields})


def install(
    folder: Path, working_dir: str = "/workspace", **programs: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the installation of Codex 1.2.3 in a workspace of mode Plain, with these shell scripts on its PATH."""
    programs_folder, here = folder / "bin", folder / "root/workspace"
    for path in (programs_folder, here):
        path.mkdir(parents=True)
    for name, text in {
        **programs,
        "rm": 'exec /bin/rm "$@"',
        "mkdir": 'exec /bin/mkdir "$@"',
        "grep": 'exec /bin/grep "$@"',
    }.items():
        (programs_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs_folder / name).chmod(0o755)
    program = program_of(Agent(type="Codex", config={"version": "1.2.3"}), working_dir)
    assert program is not None
    (command,) = program.install
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=here, env={"PATH": str(programs_folder)}, capture_output=True, text=True
    )
    return done, folder / "root"


def test_a_program_of_that_version_is_not_installed_again(tmp_path: Path) -> None:
    done, _ = install(tmp_path, codex="echo codex-cli 1.2.3", npm="exit 9")
    assert done.returncode == 0, done.stderr


def test_another_version_is_installed_below_the_workspaces_own_tmp(tmp_path: Path) -> None:
    done, root = install(tmp_path, codex="echo codex-cli 1.2.30", npm='echo "$HOME" "$@"')
    folder = root / "tmp/.rollout"
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:4] == [str(folder / "setup"), "install", "--prefix", str(folder / "agents/codex-1.2.3")]
    assert done.stdout.split()[-1] == "@openai/codex@1.2.3"
    assert not (folder / "setup").exists()


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, "agent.type Codex: codex 1.2.3 is not on PATH, and neither is npm to install it"),
        ({"npm": "echo no network >&2; exit 1"}, "no network\nagent.type Codex: .*\n?.*sandbox.network.setup: Public"),
    ],
)
def test_failed_installation_says_what_to_do(tmp_path: Path, programs: dict[str, str], said: str) -> None:
    done, _ = install(tmp_path, **programs)
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr

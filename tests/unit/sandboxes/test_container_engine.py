"""How Docker and podman are found and called."""

import json
import os
from pathlib import Path

import pytest

from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.container.engine import Engine, EngineContainers, find_engine, limits, network
from agent_runtime.sandboxes.container.provider import sandbox_key
from rollout_api.sandbox import Resources

SPEC = WorkspaceSpec(group="g0", working_dir="/w", image="image:1")
CONFIG = {"tokenSha256": "0" * 64, "mode": "Plain"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one on PATH, besides the system's for the shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


async def test_the_first_engine_that_answers_is_used(programs: Path) -> None:
    program(programs, "docker", "echo 'the daemon is not running' >&2; exit 1")
    program(programs, "podman", """echo '{"host": {"security": {"rootless": true}}}'""")
    assert await find_engine({}) == Engine("podman", has_user_namespace=True)
    with pytest.raises(SandboxFailure, match=r"the daemon is not running.*--provider Local"):
        await find_engine({"ROLLOUT_CONTAINER_ENGINE": "docker"})
    with pytest.raises(SandboxFailure, match="nerdctl-like is not installed"):
        await find_engine({"ROLLOUT_CONTAINER_ENGINE": "nerdctl-like"})


async def test_docker_client_without_a_daemon_is_not_an_engine(programs: Path) -> None:
    # With a format, docker exits with 0 and reports the error in its answer.
    program(programs, "docker", """echo '{"ServerErrors": ["Cannot connect to the Docker daemon"]}'""")
    with pytest.raises(SandboxFailure, match="Cannot connect"):
        await find_engine({"ROLLOUT_CONTAINER_ENGINE": "docker"})


async def test_hanging_container_engine_is_ended_at_its_deadline(programs: Path) -> None:
    program(programs, "docker", f"echo $$ > {programs}/pid; exec sleep 600")
    with pytest.raises(SandboxFailure, match=r"docker ps did not end within 1 s"):
        await Engine("docker", has_user_namespace=False).call("ps", seconds=1)
    assert not Path(f"/proc/{(programs / 'pid').read_text().strip()}").exists()


async def asked(programs: Path, spec: WorkspaceSpec, mode: str) -> list[str]:
    program(programs, "docker", f"printf '%s\\n' \"$@\" > {programs}/asked")
    containers = EngineContainers(Engine("docker", has_user_namespace=False), Path("/bundle"), "run-1", mode=mode)
    home = programs / "home"
    home.mkdir()
    await containers.start("name-1", spec, CONFIG, home)
    return (programs / "asked").read_text().split("\n")


async def test_a_plain_container_has_no_rights_no_network_and_the_executor_first(programs: Path) -> None:
    words = await asked(programs, SPEC, "Plain")
    said = " ".join(words)
    assert "--rm" in words
    assert "--network none" in said
    assert "--cap-drop ALL" in said
    assert "--security-opt no-new-privileges" in said
    assert "SYS_ADMIN" not in said
    assert "--label rollout.dev/run=run-1" in said
    assert "--volume /bundle:/.rollout/executor:ro" in said
    config = json.loads(words[words.index("--config-json") + 1])
    assert words[words.index("--config-json") - 1] == "image:1"
    assert config == {**CONFIG, "listen": "unix:/.rollout/socket/executor", "stateDir": "/.rollout/state"}


async def test_only_a_container_with_a_user_namespace_gets_capabilities(programs: Path) -> None:
    said = " ".join(await asked(programs, SPEC, "Overlay"))
    assert "--cap-add SYS_ADMIN" in said
    assert "--user 0" in said


def test_bounds_of_a_workspace_are_the_engines_with_room_for_the_executor() -> None:
    spec = WorkspaceSpec(group="g0", working_dir="/w", resources=Resources(cpu="1500m", memory="1Gi", processes=100))
    given = limits(spec, "Plain")
    assert dict(zip(given[::2], given[1::2], strict=True)) == {
        "--cpus": "1.5",
        "--memory": str((1 << 30) + (128 << 20)),
        "--pids-limit": "132",
    }
    assert limits(spec, "Overlay") == []


def test_a_port_is_published_on_the_loopback_alone_and_only_without_a_socket() -> None:
    wanted = WorkspaceSpec(group="g0", working_dir="/w", network={"setup": "Public"})
    assert network(SPEC, by_socket=True) == ["--network", "none"]
    assert network(wanted, by_socket=True) == []
    assert network(SPEC, by_socket=False) == ["--publish", "127.0.0.1::8470"]


def test_workspaces_with_and_without_a_network_share_no_container() -> None:
    wanted = WorkspaceSpec(group="g1", working_dir="/w", image="image:1", network={"agent": ["example.org:443"]})
    assert sandbox_key(SPEC) != sandbox_key(wanted)
    assert sandbox_key(SPEC) == sandbox_key(WorkspaceSpec(group="g9", working_dir="/other", image="image:1"))

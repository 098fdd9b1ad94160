"""Harbor 0.25's keys, one by one, and their treatment here."""

import pytest

from agent_runtime.tasks.harbor_keys import handling_of, leaves, line_of

EXPECTED = {
    "honoured": """
        agent.allowed_hosts agent.network_mode agent.timeout_sec agent.user artifacts[] artifacts[].source
        environment.allow_internet environment.allowed_hosts environment.build_timeout_sec environment.cpus
        environment.docker_image environment.env.KEY environment.healthcheck.command
        environment.healthcheck.interval_sec environment.healthcheck.retries
        environment.healthcheck.start_interval_sec environment.healthcheck.start_period_sec
        environment.healthcheck.timeout_sec environment.memory environment.memory_mb environment.network_mode
        environment.os environment.storage environment.storage_mb environment.workdir metadata.KEY
        multi_step_reward_strategy schema_version solution.env.KEY source steps[].agent.timeout_sec
        steps[].healthcheck.command steps[].healthcheck.interval_sec steps[].healthcheck.retries
        steps[].healthcheck.start_interval_sec steps[].healthcheck.start_period_sec
        steps[].healthcheck.timeout_sec steps[].min_reward steps[].min_reward.KEY steps[].name
        steps[].verifier.env.KEY steps[].verifier.timeout_sec steps[].verifier.user task.authors[].email
        task.authors[].name task.description task.keywords task.name task.version verifier.allowed_hosts
        verifier.collect[].command verifier.env.KEY verifier.environment.allow_internet
        verifier.environment.allowed_hosts verifier.environment.build_timeout_sec
        verifier.environment.docker_image verifier.environment.env.KEY verifier.environment.network_mode
        verifier.environment_mode verifier.network_mode verifier.timeout_sec verifier.user version
    """,
    "reported": """
        artifacts[].destination artifacts[].exclude artifacts[].service environment.gpu_types environment.gpus
        environment.mcp_servers environment.skills_dir steps[].agent.allowed_hosts steps[].agent.network_mode
        steps[].agent.user steps[].artifacts[] steps[].artifacts[].destination steps[].artifacts[].exclude
        steps[].artifacts[].service steps[].artifacts[].source steps[].verifier.allowed_hosts
        steps[].verifier.collect steps[].verifier.environment.allow_internet
        steps[].verifier.environment.allowed_hosts steps[].verifier.environment.build_timeout_sec
        steps[].verifier.environment.cpus steps[].verifier.environment.docker_image
        steps[].verifier.environment.env.KEY steps[].verifier.environment.gpu_types
        steps[].verifier.environment.gpus steps[].verifier.environment.healthcheck.command
        steps[].verifier.environment.healthcheck.interval_sec steps[].verifier.environment.healthcheck.retries
        steps[].verifier.environment.healthcheck.start_interval_sec
        steps[].verifier.environment.healthcheck.start_period_sec
        steps[].verifier.environment.healthcheck.timeout_sec steps[].verifier.environment.mcp_servers
        steps[].verifier.environment.memory_mb steps[].verifier.environment.network_mode
        steps[].verifier.environment.os steps[].verifier.environment.skills_dir
        steps[].verifier.environment.storage_mb steps[].verifier.environment.tpu.topology
        steps[].verifier.environment.tpu.type steps[].verifier.environment.workdir
        steps[].verifier.environment_mode steps[].verifier.network_mode verifier.collect[].service
        verifier.collect[].timeout_sec verifier.collect[].user verifier.environment.cpus
        verifier.environment.gpu_types verifier.environment.gpus verifier.environment.healthcheck.command
        verifier.environment.healthcheck.interval_sec verifier.environment.healthcheck.retries
        verifier.environment.healthcheck.start_interval_sec verifier.environment.healthcheck.start_period_sec
        verifier.environment.healthcheck.timeout_sec verifier.environment.mcp_servers
        verifier.environment.memory verifier.environment.memory_mb verifier.environment.os
        verifier.environment.skills_dir verifier.environment.storage verifier.environment.storage_mb
        verifier.environment.tpu.topology verifier.environment.tpu.type verifier.environment.workdir
    """,
    "refused": """
        environment.tpu.topology environment.tpu.type
    """,
}
"""Keys of Harbor 0.25's models (`TaskConfig`), with the older names that are still accepted; KEY is any name."""


@pytest.mark.parametrize(
    ("path", "expected"), [(path, kind) for kind, paths in EXPECTED.items() for path in paths.split()]
)
def test_every_key_of_harbor_is_honoured_reported_or_refused(path: str, expected: str) -> None:
    kind, instead = handling_of(path)
    assert kind == expected
    assert bool(instead) == (kind != "honoured")
    assert "is not a key" not in instead


@pytest.mark.parametrize(
    "path", ["agent.timeout", "environment.docker_imag", "verifier.environment_mod", "stepz", "agent"]
)
def test_misspelt_key_is_reported(path: str) -> None:
    assert handling_of(path)[0] == "reported"
    assert "not a key" in handling_of(path)[1]


def test_key_without_effect_is_not_reported() -> None:
    config = {"environment": {"gpus": 0, "mcp_servers": [], "cpus": 1}, "artifacts": ["/a", {"source": "/b"}]}
    assert list(leaves(config)) == ["environment.cpus", "artifacts[]", "artifacts[].source"]


def test_a_key_is_found_in_its_own_section() -> None:
    text = 'version = "1"\n[agent]\ntimeout_sec = 1\n[verifier]\ntimeout_sec = 2\nenv = { A = "b" }\n[[steps]]\nname = "x"\n'
    assert line_of(text, "verifier.timeout_sec") == 5
    assert line_of(text, "verifier.env.A") == 6
    assert line_of(text, "steps[].name") == 8
    assert line_of(text, "environment.cpus") is None

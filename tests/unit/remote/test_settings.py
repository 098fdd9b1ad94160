"""Precedence of the settings of PR #83, and the messages for unusable ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.harbor_server.rows import not_honoured, with_remote_agent
from agent_runtime.integrations.harbor_server.settings import (
    RemoteSettings,
    SettingsError,
    as_environment,
    given_at,
    read_settings,
)

NAMES = st.one_of(st.none(), st.sampled_from(["a", "b", "c"]))


@given(NAMES, NAMES, NAMES)
def test_command_line_overrides_the_environment_and_that_the_yaml(
    typed: str | None, variable: str | None, yaml: str | None
) -> None:
    config = {"remote_agent": {"agent_name": typed or yaml, "max_retries": 2}}
    overrides = [] if typed is None else [f"++remote_agent.agent_name={typed}"]
    environ = {} if variable is None else {"REMOTE_AGENT_NAME": variable}

    settings = read_settings(config, environ, given_at(overrides, config))

    assert settings is not None
    assert settings.agent_name == (typed or variable or yaml)


def test_a_variable_that_is_empty_is_not_set() -> None:
    config = {"remote_agent": {"agent_name": "a"}}

    settings = read_settings(config, {"REMOTE_AGENT_NAME": "", "HARBOR_TIMEOUT": ""})

    assert settings == RemoteSettings(agent_name="a")


def test_a_user_who_names_no_remote_agent_gets_none() -> None:
    config = {"remote_agent": {"agent_name": None}, "proxy_server": {"port": 0}}

    assert read_settings(config, {"LLM_PROXY_IP": "10.0.0.1", "HARBOR_DATASET_DIRS": "/tasks"}) is None


def test_all_bad_values_are_reported_with_their_names() -> None:
    environ = {
        "REMOTE_AGENT_KWARGS": "{not json",
        "REMOTE_AGENT_ENVIRONMENT_OVERRIDES": "[1]",
        "REMOTE_AGENT_MAX_RETRIES": "many",
        "REMOTE_AGENT_USE_LOCAL_TRIAL": "maybe",
        "HARBOR_TIMEOUT": "-1",
        "HARBOR_SERVER_URL": "harbor:8080",
        "PROXY_SERVER_URL": "proxy:8080",
    }

    with pytest.raises(SettingsError) as refused:
        read_settings({"proxy_server": {"port": 99999}}, environ)

    told = str(refused.value).splitlines()
    assert len(told) == len(environ) + 1
    assert all(any(name in line for line in told) for name in (*environ, "proxy_server.port"))
    assert 'expected a JSON object such as {"name": "value"}' in str(refused.value)


def test_workers_get_the_resolved_settings() -> None:
    settings = RemoteSettings(
        agent_name="a",
        agent_kwargs={"x": [1]},
        max_retries=5,
        use_local_trial=True,
        llm_proxy_ip="10.0.0.1",
        proxy_server_url="http://proxy",
    )

    assert read_settings({"remote_agent": {"agent_name": "b"}}, as_environment(settings)) == settings


def config(**custom: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": {"custom": {"agent_rollouts": custom, "of_others": 1}, "n": 2}}}


def test_a_local_trial_is_done_by_the_agent_of_that_name() -> None:
    settings = RemoteSettings(
        agent_name="swe-agent", use_local_trial=True, environment_overrides={"A": 1}, max_retries=4
    )

    changed = with_remote_agent(config(agent={"maxTurns": 5}), settings)["actor_rollout_ref"]["rollout"]

    assert changed == {
        "n": 2,
        "custom": {
            "agent_rollouts": {
                "agent": {"type": "SWE", "maxTurns": 5},
                "attempts": {"limit": 4, "backoffSeconds": 2.0},
                "sandbox": {"env": [{"name": "A", "value": "1"}]},
            },
            "of_others": 1,
        },
    }


def test_missing_agent_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(SettingsError, match=r"cleverest.*ToolCalling, ReAct"):
        with_remote_agent(config(), RemoteSettings(agent_name="cleverest", use_local_trial=True))


def test_unsupported_field_of_a_local_trial_is_reported() -> None:
    settings = RemoteSettings(
        use_local_trial=True,
        environment_kwargs={"namespace": "d", "cpus": 1},
        agent_kwargs={"cost": 0},
        proxy_server_url="http://proxy",
    )

    assert [line.split()[0] for line in not_honoured(settings)] == [
        "remote_agent.proxy_server_url",
        "remote_agent.environment_kwargs.namespace",
        "remote_agent.agent_kwargs",
    ]

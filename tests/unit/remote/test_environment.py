"""The effects of `environment_kwargs` and `environment_import_path` of verl-recipe PR #83."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.harbor_server.environment import changed_sandbox, own_provider, read_environment
from agent_runtime.integrations.harbor_server.rows import environment_of
from agent_runtime.integrations.harbor_server.settings import RemoteSettings, SettingsError, read_settings
from rollout_api.sandbox import SandboxOverrides, SandboxTemplate
from tests.support.own_trials import Sandboxes

ACK = "harbor.environments.ack:ACKEnvironment"
DOCKER = "harbor.environments.docker.docker:DockerEnvironment"
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.dictionaries(st.text(), st.none()))
NAMES = ("cpus", "memory_mb", "image", "sandbox_env_vars", "claim_timeout", "namespace", "node_selector", "registry")


def test_known_keys_become_fields_of_the_sandbox_and_others_are_reported() -> None:
    found = read_environment(
        {
            "sandbox_image": "registry/swe:1",
            "cpus": 2,
            "memory_mb": 512,
            "storage_mb": 1024,
            "sandbox_env_vars": '{"LANG": "C"}',
            "claim_timeout": "300",
            "use_buildkit": True,
            "kubeconfig": None,
        },
        "Local",
    )

    task = SandboxOverrides.model_validate(found.task)
    assert (task.image, task.resources and task.resources.wire()) == (
        "registry/swe:1",
        {"cpu": "2", "memory": "512Mi", "disk": "1024Mi"},
    )
    assert [(variable.name, variable.value) for variable in task.env] == [("LANG", "C")]
    assert SandboxTemplate.model_validate(found.job).start_seconds == 300
    assert found.not_honoured == ["use_buildkit"]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES), st.sampled_from(["Local", "Container", "Kodo"]))
def test_every_ignored_key_is_reported(kwargs: dict[str, Any], provider: str) -> None:
    found = read_environment(kwargs, provider)

    honoured = [name for name, value in kwargs.items() if value is not None and name not in found.not_honoured]
    given = [*found.task.get("resources", {}), *found.task.keys() - {"resources"}, *found.job.keys() - {"kodo"}]
    assert len(honoured) == len(given) + len(found.job.get("kodo", {}))


def test_environment_overrides_fields_of_the_tasks_sandbox_and_keeps_the_others() -> None:
    own = {"image": "a", "user": "u", "env": [{"name": "A", "value": "1"}], "resources": {"cpu": "1", "memory": "1Gi"}}
    found = read_environment({"image": "b", "cpus": 3, "sandbox_env_vars": {"B": 2}}, "Local")

    assert changed_sandbox(own, found.task) == {
        "image": "b",
        "user": "u",
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "resources": {"cpu": "3", "memory": "1Gi"},
    }


def test_environments_of_harbor_are_providers_of_ours() -> None:
    kwargs = {"namespace": "agents", "node_selector": {"gpu": "true"}, "registry": "r"}
    ack = environment_of(RemoteSettings(environment_import_path=ACK, environment_kwargs=kwargs))
    docker = environment_of(RemoteSettings(environment_import_path=DOCKER, environment_kwargs=kwargs))

    kodo = {"backend": "Kubernetes", "namespace": "agents", "nodeSelector": {"gpu": "true"}}
    assert ack.job == {"provider": "Kodo", "kodo": kodo}
    assert docker.job == {"provider": "Container"}
    assert ack.not_honoured == ["registry"]
    assert docker.not_honoured == ["namespace", "node_selector", "registry"]
    assert SandboxTemplate.model_validate(ack.job).kodo.namespace == "agents"


@pytest.mark.parametrize(
    ("path", "kwargs", "words"),
    [
        (
            "nowhere.at_all:Sandboxes",
            {},
            "environment_import_path 'nowhere.at_all:Sandboxes': importing nowhere.at_all",
        ),
        ("tests.support.own_trials:Sandboxen", {}, "did you mean 'Sandboxes'"),
        ("tests.support.own_trials:NoSandboxes", {}, "has no open, acquire"),
        (
            "tests.support.own_trials:Sandboxes",
            {"namespace": "d"},
            "environment_kwargs: .*missing a required argument: 'folder'",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(path: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        own_provider(RemoteSettings(environment_import_path=path, environment_kwargs=kwargs))


def test_custom_environment_class_gets_the_kwargs() -> None:
    path = "tests.support.own_trials:Sandboxes"
    settings = RemoteSettings(environment_import_path=path, environment_kwargs={"folder": "f"}, use_local_trial=True)

    make = own_provider(settings)

    assert make is not None
    assert isinstance(make(), Sandboxes)
    assert environment_of(settings).not_honoured == []


@pytest.mark.parametrize("variable", ["REMOTE_AGENT_IMPORT_PATH", "REMOTE_AGENT_ENVIRONMENT_IMPORT_PATH"])
def test_an_import_path_without_a_class_is_refused(variable: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}: is 'my.module': expected `module:Class`"):
        read_settings({}, {variable: "my.module"})

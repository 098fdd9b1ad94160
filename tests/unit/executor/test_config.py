"""How the executor is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.__main__ import USAGE_ERROR, main
from agent_runtime.executor.config import image_environment, read_config

CONFIG = {"listen": "tcp:0.0.0.0:8470", "tokenSha256": "0" * 64, "stateDir": "/.rollout/state"}
NAMES = st.text(st.characters(exclude_characters="=\0"), min_size=1).filter(
    lambda name: not name.startswith("KUBERNETES_") and name != "HOSTNAME"
)


@given(st.dictionaries(NAMES, st.text(st.characters(exclude_characters="\0"))))
def test_commands_get_the_images_variables_as_they_are(variables: dict[str, str]) -> None:
    assert image_environment(f"{name}={value}" for name, value in variables.items()) == variables


def test_commands_do_not_see_the_api_servers_address() -> None:
    given = [
        "KUBERNETES_SERVICE_HOST=10.0.0.1",
        "KUBERNETES_PORT=tcp://10.0.0.1:443",
        "HOSTNAME=pod",
        "HOSTNAMES=a",
        "A=",
    ]
    assert image_environment(given) == {"HOSTNAMES": "a", "A": ""}


def test_the_environment_is_part_of_the_hosts_configuration() -> None:
    assert read_config(json.dumps(CONFIG), {"PATH": "/bin"}).host.environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage"),
        (["--config"], "usage"),
        (["--config-json", "{}", "--environment"], "config.listen"),
        (["--config-json", "no JSON", "--environment", "A=b"], "one JSON object expected"),
        (["--config-json", json.dumps(CONFIG | {"statedir": "/"})], "statedir"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--copy-to", "/tmp"], "not the portable bundle"),
    ],
)
def test_wrong_configuration_is_refused_with_what_was_expected(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forking a zygote is for a process that has nothing else in it.
    for name in ("start_zygote", "name_process"):
        monkeypatch.setattr(f"agent_runtime.executor.__main__.{name}", lambda *_: None)
    assert main(arguments) == USAGE_ERROR
    assert said in capsys.readouterr().err


def test_a_configuration_file_is_named_where_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("start_zygote", "name_process"):
        monkeypatch.setattr(f"agent_runtime.executor.__main__.{name}", lambda *_: None)
    file = tmp_path / "executor.json"
    file.write_text(json.dumps({**CONFIG, "listen": "udp:1"}))
    assert main(["--config", str(file)]) == USAGE_ERROR
    said = capsys.readouterr().err
    assert str(file) in said
    assert "listen" in said

"""What `rolloutctl sandbox` says of a Sandbox that cannot be used."""

from typing import Any

import pytest

from rolloutctl.commands.sandbox import _ready_sandbox
from rolloutctl.errors import CommandError


class Api:
    """An API server with one Sandbox."""

    def __init__(self, reason: str, **spec: Any) -> None:
        ready = {"type": "Ready", "status": "False", "reason": reason, "message": "its files are stored"}
        self.sandbox = {"spec": spec, "status": {"conditions": [ready]}}

    def get_namespaced_custom_object(self, *names: str) -> dict[str, Any]:
        return self.sandbox


def test_parked_sandbox_names_the_command_that_brings_it_back() -> None:
    with pytest.raises(CommandError, match=r"Sandbox mine is parked\. Parked: its files are stored") as refused:
        _ready_sandbox(Api("Parked", running=False), "lab", "mine")
    command = """kubectl patch sandbox mine -n lab --type merge -p '{"spec":{"running":true}}'"""
    assert str(refused.value.hint).endswith(command)


def test_sandbox_whose_files_come_back_is_not_ready() -> None:
    with pytest.raises(CommandError, match=r"Sandbox mine is not ready\. Restoring: "):
        _ready_sandbox(Api("Restoring", running=True), "lab", "mine")

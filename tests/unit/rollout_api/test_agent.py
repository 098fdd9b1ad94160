"""An agent that cannot do what its manifest requires is refused before anything runs."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollout_api.rollout_job import Agent

COMMAND = {"type": "Command", "command": ["mini"]}
TIME = {"name": "time", "command": ["mcp-server-time"]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trajectory": {"path": "t.json"}}, "trajectory is only for type Command"),
        ({**COMMAND, "trajectory": {"path": "t.json", "format": "Other"}}, "MiniSWEAgent"),
        ({**COMMAND, "mcpServers": [TIME]}, "mcpServers is not for type Command"),
        ({"type": "Nop", "mcpServers": [TIME]}, "mcpServers is not for type Nop"),
        ({**COMMAND, "context": {"maxMessages": 10}}, "context is not for type Command"),
        ({**COMMAND, "tools": ["bash"]}, "tools is not for type Command"),
        ({"mcpServers": [TIME, TIME]}, "two servers have the same name"),
        ({"mcpServers": [{"name": "time"}]}, "exactly one of command"),
        ({"mcpServers": [{**TIME, "url": "http://time"}]}, "exactly one of command"),
        ({"mcpServers": [{**TIME, "name": "a b"}]}, "pattern"),
        ({"mcpServers": [{"name": "time", "url": "ftp://time"}]}, "pattern"),
    ],
)
def test_incompatible_fields_are_reported(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Agent.model_validate(fields)


def test_compatible_fields_are_accepted() -> None:
    Agent.model_validate({**COMMAND, "trajectory": {"path": "t.json"}})
    Agent.model_validate({**COMMAND, "tools": Agent().tools})  # as a cluster returns it
    Agent.model_validate({"mcpServers": [TIME, {"name": "web", "url": "https://web/mcp", "tools": ["get"]}]})

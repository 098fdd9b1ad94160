"""The parts of an agent in Python, before it runs."""

import logging
from typing import Any

import pytest

from agent_rollouts.agentic_rollout_library import (
    AgenticRollout,
    AgenticRolloutConfig,
    PromptBuilder,
    create_agent,
    create_agents,
)
from agent_runtime.agents.react import ReAct
from agent_runtime.agents.tool_calling import Coding, ToolCalling
from agent_runtime.extensions import ExtensionError
from rolloutctl.agents.loop import saves_trajectories, set_log_level


async def generate(messages: Any) -> str:
    return "Final Answer: none"


def test_the_kinds_of_agents_are_made_by_name() -> None:
    agents = create_agents(
        {"General": {"max_rounds": 3}, "React": {"max_steps": 4}, "coding": {}, "Tool": {}, "SWE": {}}
    )
    assert [agent.max_rounds for agent in agents.values()] == [3, 4, 10, 10, 10]
    assert [agents[name].loop for name in ("General", "React", "coding", "Tool")] == [ReAct, ReAct, ReAct, ToolCalling]
    assert agents["coding"].system_prompt == Coding.system_prompt
    with pytest.raises(ExtensionError, match="no agent is named 'Reakt'"):
        create_agent("Reakt")
    with pytest.raises(ValueError, match="not both"):
        create_agent("Tool", {"action_parser": str})
    with pytest.raises(TypeError, match="max_round"):
        create_agent("React", {"max_round": 4})


@pytest.mark.parametrize(
    ("field", "value", "complaint"), [("batch_size", 8, "batch_size is 8, expected 1: generate_sequences")]
)
def test_a_setting_that_would_have_no_effect_is_refused(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        AgenticRolloutConfig(**{field: value})


def test_a_configuration_makes_agent_and_tools() -> None:
    config = AgenticRolloutConfig(agent_type="tool", max_steps=3, tools_config={"calculator": {"precision": 4}})
    rollout = AgenticRollout(config, generate)
    assert (rollout.agent.loop, rollout.agent.max_rounds, list(rollout.tools)) == (ToolCalling, 3, ["calculator"])
    assert rollout.agent.tools == rollout.tools


async def test_a_prompt_without_content_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\{'question': 'x'\}; expected text, or a mapping with `content`"):
        await create_agent("React").run_trajectory({"question": "x"}, generate, "x")


def test_a_variable_is_filled_in_everywhere_and_other_braces_stay() -> None:
    builder = PromptBuilder("Mend {bug}.").add_section("Form", '{"name": "{bug}"}').add_variable("bug", "#123")
    assert builder.build() == 'Mend #123.\n\nForm:\n{"name": "#123"}'


def test_log_level_and_saving_are_set_by_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("rolloutctl.agents")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [])
    set_log_level({"AGENTIC_LOG_LEVEL": "debug"})
    assert logger.level == logging.DEBUG
    with pytest.raises(ValueError, match="AGENTIC_LOG_LEVEL is 'loud'; expected DEBUG, INFO"):
        set_log_level({"AGENTIC_LOG_LEVEL": "loud"})
    assert (saves_trajectories({}), saves_trajectories({"AGENTIC_SAVE_TRAJECTORIES": "False"})) == (True, False)
    with pytest.raises(ValueError, match="AGENTIC_SAVE_TRAJECTORIES is 'maybe'; expected true or false"):
        saves_trajectories({"AGENTIC_SAVE_TRAJECTORIES": "maybe"})

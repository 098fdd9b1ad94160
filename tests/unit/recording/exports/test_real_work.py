"""Export in Real Work's format."""

from agent_runtime.export.real_work import trajectory_of
from tests.support.recorded_run import BRANCHED, ROLLOUTS, TOOL_USE


def test_tool_calls_that_were_copied_from_another_rollout_are_steps_and_no_actions() -> None:
    result = ROLLOUTS[0][0]
    for records, actions in ((TOOL_USE, 1), (BRANCHED, 0)):
        trajectory = trajectory_of("run", records, result, None)
        assert len(trajectory["steps"]) == 1
        assert trajectory["episode_result"]["total_actions"] == actions

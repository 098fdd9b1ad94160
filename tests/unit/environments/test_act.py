import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from agent_runtime.environments.act import ACT, Act, action_results, episode_verdict, observation_text, step_rewards
from agent_runtime.environments.host import Action, Beginning, EnvironmentFailure, Move, checked_reply, moves
from agent_runtime.tools.base import ToolContext, ToolResult, ToolWorkspace
from rollout_api.environments import RunIn, TaskEnvironment
from rollout_api.records import Observation, ObservationsRecord, Record
from rollout_api.tasks import Task

LAKE = TaskEnvironment(id="FrozenLake")
SANDBOXED = LAKE.model_copy(update={"run_in": RunIn.SANDBOX})
TASK = Task(name="t", prompt="Turn {turn}: {feedback}\n{observation}", environment=LAKE)
CONTEXT = ToolContext(workspace=cast(ToolWorkspace, None), task=TASK, call_id="c", seconds_left=60)


class Walk:
    """An episode in which each action counts one, and the third ends it. After `lost` steps, it starts again."""

    def __init__(self, *, lost: int | None = None, drift: float = 0.0) -> None:
        self._lost, self._drift = lost, drift
        self.asked: list[list[Action]] = []

    async def start(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        return Beginning("place 0", "Walk."), self._moves(len(past))

    async def take(self, past: Sequence[Action], action: Action, workspace: ToolWorkspace) -> list[Move]:
        self.asked.append([*past, action])
        every = self._moves(len(past) + 1)
        return every if self._lost == len(past) else every[-1:]

    def _moves(self, count: int) -> list[Move]:
        return [Move(f"place {n}", n + self._drift, n == 3, False, True, True, n == 3) for n in range(1, count + 1)]

    def close(self) -> None:
        pass


def act(host: Walk, recorded: Sequence[Record] = ()) -> Act:
    return Act(TASK, host, Beginning("place 0", "Walk."), action_results(recorded))


async def steps(tool: Act, *actions: str | None) -> list[ToolResult]:
    return [await tool.execute({} if action is None else {"action": action}, CONTEXT) for action in actions]


def recorded(*results: ToolResult) -> list[Record]:
    return [
        ObservationsRecord(
            turn=turn,
            time=0,
            results=[Observation(call_id="c", tool=ACT, content=step.content, stop=step.stop, data=dict(step.data))],
        )
        for turn, step in enumerate(results)
    ]


async def test_repeated_agent_continues_after_the_journaled_actions() -> None:
    first = await steps(act(Walk()), "a", None)
    host = Walk()
    [third] = await steps(act(host, recorded(*first)), "c")
    assert host.asked == [["a", None, "c"]]
    assert (third.content, third.stop) == ("place 3", True)


async def test_repeated_episode_with_other_results_fails() -> None:
    same = await steps(act(Walk(lost=1)), "a", "b")
    assert [step.content for step in same] == ["place 1", "place 2"]
    tool = act(Walk(lost=1, drift=0.5), recorded(*await steps(act(Walk()), "a")))
    with pytest.raises(EnvironmentFailure, match=r"EnvironmentDiverged: .*action 'a' gave reward 1.5, but 1 before"):
        await steps(tool, "b")


async def test_replaced_process_in_sandbox_is_the_rollouts_own_failure() -> None:
    task = TASK.model_copy(update={"environment": SANDBOXED})
    own = Act(task, Walk(lost=2, drift=0.5), Beginning("place 0", "Walk."))
    await steps(own, "a", "b")
    own._past[0].data["reward"] = 0.0
    with pytest.raises(EnvironmentFailure, match="EnvironmentDied: repeated actions had another result"):
        await steps(own, "c")


async def test_actions_after_the_end_are_reported_and_change_no_reward() -> None:
    host = Walk()
    after = await steps(act(host), "a", "b", "c", "d")
    assert (after[3].error, "reward" in after[3].data) == (True, False)
    assert step_rewards(recorded(*after)) == [1, 2, 3]
    assert len(host.asked) == 3


async def test_concurrent_calls_are_sequential_steps() -> None:
    tool = act(Walk())
    both = await asyncio.gather(tool.execute({"action": "a"}, CONTEXT), tool.execute({"action": "b"}, CONTEXT))
    assert [step.content for step in both] == ["place 1", "place 2"]


async def test_the_reward_is_the_sum_of_the_steps_and_success_is_the_environments_word() -> None:
    verdict = episode_verdict(LAKE, recorded(*await steps(act(Walk()), "a", "b", "c")))
    assert (verdict.reward, verdict.passed) == (6, True)
    assert verdict.rewards == {"success": 1.0, "action_is_valid": 1.0, "action_is_effective": 1.0}
    unfinished = episode_verdict(LAKE, recorded(*await steps(act(Walk()), "a")))
    assert (unfinished.reward, unfinished.passed) == (1, False)


def test_verdict_of_environment_in_sandbox_is_forgeable() -> None:
    assert [episode_verdict(environment, []).forgeable for environment in (LAKE, SANDBOXED)] == [False, True]


def test_an_episode_without_a_step_has_reward_zero() -> None:
    assert (episode_verdict(LAKE, []).reward, episode_verdict(LAKE, []).passed) == (0.0, False)


def test_first_prompt_has_the_rules_and_the_first_observation() -> None:
    assert act(Walk()).task.prompt == "Walk.\nTurn 1: place 0"


def test_placeholders_in_an_observation_are_not_replaced() -> None:
    text = observation_text(
        "{turn}|{observation}|{actionsLeft}", observation="{turn}{feedback}", turn=2, actions_left=5
    )
    assert text == "2|{turn}{feedback}|5"
    assert (
        observation_text("{feedback}\n{observation}", observation="x", feedback="Wrong.", turn=1, actions_left=1)
        == "Wrong.\nx"
    )


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"not json", b'{"error": "it broke"}', b"[" * 5000], ids=lambda line: str(line[:12])
)
def test_invalid_answer_of_an_environment_in_a_sandbox_is_an_error(line: bytes) -> None:
    with pytest.raises(EnvironmentFailure, match="EnvironmentFailed: game"):
        checked_reply(line, "game")


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"moves": []},
        {"moves": [{"observation": "x"}]},
        {
            "moves": [
                {"observation": "x", "reward": float("inf"), "terminated": False, "truncated": False, "valid": True}
            ]
        },
        {"moves": [{"observation": "x", "reward": 1e308, "terminated": False, "truncated": False, "valid": True}]},
        {"moves": [{"observation": "x", "reward": 1, "terminated": False, "truncated": False, "valid": True}] * 2},
    ],
    ids=lambda reply: str(reply)[:30],
)
def test_moves_that_are_malformed_or_too_many_are_refused(reply: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFailure, match="EnvironmentFailed"):
        moves(reply, at_most=1)

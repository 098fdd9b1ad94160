"""Episodes as ROLL's env managers request them."""

from pathlib import Path
from typing import Any

from agent_runtime.integrations.roll_episodes import AgentRunner, EpisodeStatus
from agent_runtime.models.providers.function import FunctionModel

GAME = "tests.support.games:Game"


def says(*answers: str) -> FunctionModel:
    """Return a model that gives these answers by turn, and repeats the last one."""

    async def answer(messages: list[dict[str, Any]], turn: int) -> str:
        return f"<answer>{answers[min(turn, len(answers) - 1)]}</answer>"

    return FunctionModel(answer, "test")


def test_each_seed_is_an_episode_with_its_steps_and_its_score() -> None:
    with AgentRunner({"id": GAME, "maxSteps": 5}, model=says("a", "b", "end")) as runner:
        first, second = runner.run_job(3), runner.run_job(4)
    assert (first.status, first.score, first.step_scores) == (EpisodeStatus.FINISHED, 3.0, [1.0, 1.0, 1.0])
    assert first.to_dict() == {
        "status": "Finished",
        "score": 3.0,
        "step_scores": [1.0, 1.0, 1.0],
        "agent_exit_reason": "Finished",
        "success": 1.0,
        "action_is_valid": 1.0,
    }
    assert second == first


def test_status_has_the_end_of_an_episode() -> None:
    short = {"timeouts": {"commandSeconds": 1}}
    once: dict[str, Any] = {"attempts": {"limit": 1, "backoffSeconds": 0}}
    with AgentRunner({"id": GAME, **short}, model=says("a", "hang"), **once) as runner:
        hung = runner.run_job(1)
    assert (hung.status, hung.score, hung.agent_exit_reason) == (EpisodeStatus.TIMEOUT, 1.0, "ResourceLimit")
    with AgentRunner({"id": GAME}, model=says("die"), **once) as runner:
        died = runner.run_job(1)
    assert (died.status, died.agent_exit_reason) == (EpisodeStatus.FINISHED, "ResourceLimit")
    with AgentRunner({"id": GAME, "config": {"limit": 2}}, model=says("end"), **once) as runner:
        ends = [runner.run_job(seed).status for seed in (1, *range(2, 30))]
        assert ends == [EpisodeStatus.FINISHED, *[EpisodeStatus.NO_DATA] * 28], "no seed without data counts as lost"


def test_members_of_a_group_draw_their_own_answers_in_the_same_episode() -> None:
    drawn = []

    async def answer(messages: list[dict[str, Any]], seed: int) -> str:
        drawn.append(seed)
        return "<answer>end</answer>"

    for _ in range(2):
        with AgentRunner({"id": GAME}, model=FunctionModel(answer, "test")) as runner:
            runner.run_job(1)
    assert len(set(drawn)) == 2


def test_a_field_of_the_agent_leaves_the_others_as_they_are() -> None:
    pattern = {"config": {"answerPattern": "<answer>(.*?)</answer>"}}
    with AgentRunner({"id": GAME, "maxSteps": 40}, model=says("a"), agent=pattern) as runner:
        assert runner.run_job(1).score == 40.0


def test_model_may_be_the_field_of_a_manifest() -> None:
    with AgentRunner(
        {"id": GAME}, model={"function": "tests.integration.environments.test_agent_runner:ends"}
    ) as runner:
        assert runner.run_job(1).score == 1.0


async def ends(messages: list[dict[str, Any]]) -> str:
    return "<answer>end</answer>"


def test_episodes_are_recorded_in_the_given_output(tmp_path: Path) -> None:
    with AgentRunner({"id": GAME}, model=says("end"), output={"uri": str(tmp_path)}) as runner:
        runner.run_job(1)
    assert list(tmp_path.glob("episodes-*/seals/0.json"))


def test_episode_of_a_second_runner_is_separate_from_earlier_ones_in_the_same_output(tmp_path: Path) -> None:
    output = {"uri": str(tmp_path)}
    with AgentRunner({"id": GAME, "maxSteps": 5}, model=says("a", "b", "end"), output=output) as runner:
        assert runner.run_job(1).score == 3.0
    with AgentRunner({"id": GAME, "maxSteps": 5}, model=says("end"), output=output) as runner:
        assert runner.run_job(2).score == 1.0

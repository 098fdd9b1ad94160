"""The notes at the end of a run explain what went wrong, without a look at code or journals."""

from collections.abc import Mapping, Sequence

from rollout_api.records import Outcome, Result, Seal, StopReason, Verdict
from rollout_api.tasks import VerifierMode
from rolloutctl.ui import figures as module


def result(index: int, outcome: Outcome = Outcome.COMPLETED, stop: StopReason | None = None, **more: object) -> Result:
    fields = {"index": index, "group": 0, "member": index, "task": "t", "mode": "Train", "seed": 0, "attempt": 1}
    return Result.model_validate(fields | {"outcome": outcome, "stop_reason": stop} | more)


def notes(results: Sequence[Result], verdicts: Mapping[int, Verdict]) -> list[str]:
    return module.notes(Seal(result=result, verdict=verdicts.get(result.index), objects=[]) for result in results)


def test_ordinary_run_has_no_notes() -> None:
    verdict = Verdict(reward=1, passed=True)
    assert notes([result(0, stop=StopReason.FINISHED, reward=1.0)], {0: verdict}) == []


def test_files_left_out_of_the_grading_are_listed_and_explained() -> None:
    dropped = {
        0: Verdict(reward=0, passed=False, dropped=["conftest.py is loaded automatically"]),
        3: Verdict(reward=0, passed=False, dropped=["conftest.py is loaded automatically", "evil.pth is, too"]),
    }
    (note,) = notes([result(0), result(1), result(3)], dropped)
    assert "conftest.py is loaded automatically ×2; evil.pth is, too. " in note
    assert "Rollouts 0, 3." in note


def test_every_reason_for_stopping_early_is_explained_in_words() -> None:
    for stop in StopReason:
        said = notes([result(7, stop=stop)], {})
        assert (said == []) == (stop is StopReason.FINISHED)
        if said:
            assert "Rollout 7." in said[0]


def test_masked_rollouts_are_reported_with_their_reasons() -> None:
    lost = [result(i, Outcome.INFRA_FAILED, reason="SandboxLost", message=f"pod {i} ended") for i in range(9)]
    (note,) = notes(lost, {})
    assert note.startswith("9 rollouts were lost to infrastructure")
    assert "SandboxLost ×9" in note
    assert "masked" in note
    assert note.endswith("Rollouts 0, 1, 2, 3, 4, …. First: pod 0 ended")


def test_forgeable_rewards_are_called_that() -> None:
    shared = Verdict(reward=1, passed=True, mode=VerifierMode.SHARED, forgeable=True)
    (note,) = notes([result(0), result(1)], {0: shared, 1: shared.model_copy(update={"mode": VerifierMode.SEPARATE})})
    assert "1 rollout was graded in the agent's own workspace" in note


def test_error_of_a_tool_is_shown_once_for_all_rollouts_with_its_place() -> None:
    traceback = 'Traceback (most recent call last):\n  File "mine.py", line {}, in search\n    x\nKeyError: 1'
    raised = [result(index, toolTracebacks={"search": traceback.format(index)}) for index in range(3)]
    (note,) = notes([*raised, result(3)], {})
    assert note.startswith("The code of tool search raised in 3 rollouts.")
    assert note.endswith("Rollouts 0, 1, 2. First error: mine.py:0: KeyError: 1")


def test_plugin_that_refused_every_tool_call_of_a_rollout_is_reported() -> None:
    def refused(index: int, calls: int) -> Result:
        return result(index, toolCalls=calls, plugins={"Careful": {"calls": 4, "seconds": 0.1, "refused": 3}})

    (note,) = notes([refused(0, 3), refused(1, 4), refused(2, 3)], {})
    assert note.startswith("Plugin Careful refused every tool call of 2 rollouts: 6 calls.")
    assert note.endswith("Rollouts 0, 2.")


def test_verifiers_without_a_usable_report_are_counted_by_reason() -> None:
    silent = [result(index, verifierMessage="reward.txt was not written") for index in (0, 2)]
    (note,) = notes([silent[0], result(1), silent[1]], {})
    assert "2 rollouts got a failed verdict" in note
    assert "reward.txt was not written ×2." in note
    assert "Rollouts 0, 2." in note


def test_token_forks_are_counted_and_explained() -> None:
    (note,) = notes([result(0, token_forks=2), result(1), result(2, token_forks=1)], {})
    assert "2 rollouts" in note
    assert "3 times" in note
    assert "Rollouts 0, 2" in note

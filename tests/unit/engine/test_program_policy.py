"""How a program's end is attributed to the policy or not."""

from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.engine.program.program import Program
from agent_runtime.engine.program.program_rules import LONGEST_ARGUMENT, Ended, is_cut, refuse_long_arguments, stop_of
from agent_runtime.models.base import STORAGE_SILENT, ContextExceeded, ModelError
from agent_runtime.proxy.limits import Exhausted
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from rollout_api.records import CallError, DeliveryRecord, IntentRecord, Record, ResponseRecord, StopReason

OVER = Exhausted(StopReason.MAX_TURNS, "its 3 turns are used up")
AWAY = ModelError("Unreachable", "connection refused")


def result(code: int | None = 0, *, signal: int | None = None, cause: str | None = None) -> CommandResult:
    return CommandResult(code, signal, cause, 1.0, b"said\n", b"Traceback: boom\n", 5, 16)


def intent(turn: int, parent: int | None = None, digest: str | None = None) -> IntentRecord:
    return IntentRecord(turn=turn, time=0, keep=0, messages=[], parent=parent, request_digest=digest)


def response(turn: int) -> ResponseRecord:
    return ResponseRecord(turn=turn, time=0, seconds=0, message={}, finish_reason="stop")


def delivery(turn: int, *, delivered: bool = True) -> DeliveryRecord:
    return DeliveryRecord(turn=turn, time=0, delivered=delivered)


def test_prompt_that_is_too_long_for_an_argument_is_refused_with_advice() -> None:
    refuse_long_arguments(["a", "x" * LONGEST_ARGUMENT])
    with pytest.raises(SandboxFailure, match=r"agent.command\[1\] has 131072 bytes.*\{promptFile\}"):
        refuse_long_arguments(["a", "x" * (LONGEST_ARGUMENT + 1)])


@pytest.mark.parametrize("how", [{}, {"cut": True}, {"over": OVER}, {"refusal": StopReason.CONTEXT_EXCEEDED}])
def test_exit_code_0_is_finished_unless_the_model_failed_the_last_call(how: dict[str, Any]) -> None:
    assert stop_of(Ended(result(), **how)) == (StopReason.FINISHED, "said\nTraceback: boom")


@pytest.mark.parametrize("ending", [result(), result(1), result(None, signal=9), result(None, signal=11)])
def test_program_that_ends_after_a_failed_call_is_an_infrastructure_failure(ending: CommandResult) -> None:
    with pytest.raises(ModelError, match="connection refused"):
        stop_of(Ended(ending, failure=AWAY, over=OVER))


@pytest.mark.parametrize("ending", [result(1), result(None, signal=9), result(None, signal=11)])
def test_program_that_ends_after_a_cut_call_is_interrupted(ending: CommandResult) -> None:
    with pytest.raises(SandboxFailure) as caught:
        stop_of(Ended(ending, cut=True, over=OVER))
    assert caught.value.reason == "Interrupted"


@pytest.mark.parametrize(
    ("ended", "reason", "words"),
    [
        (Ended(result(3)), StopReason.AGENT_ERROR, "ended with exit code 3: said\nTraceback: boom"),
        (Ended(result(None, signal=9)), StopReason.AGENT_ERROR, "ended with signal 9"),
        (Ended(result(None, signal=9, cause="Processes")), StopReason.AGENT_ERROR, "ended with Processes"),
        (Ended(result(1), over=OVER), StopReason.MAX_TURNS, "its 3 turns are used up"),
        (Ended(result(1), refusal=ContextExceeded("too long")), StopReason.CONTEXT_EXCEEDED, "boom"),
    ],
)
def test_programs_own_failure_counts_against_the_policy(ended: Ended, reason: StopReason, words: str) -> None:
    stop = stop_of(ended)
    assert stop[0] is reason
    assert words in stop[1]


def test_program_that_cannot_start_gives_no_reward() -> None:
    with pytest.raises(SandboxFailure, match=r"agent.command cannot be started: said") as caught:
        stop_of(Ended(result(None, cause="NotStarted")))
    assert caught.value.reason == "AgentNotStarted"


def test_a_program_that_an_earlier_runner_ended_at_a_limit_has_reached_that_limit() -> None:
    killed = result(None, signal=9, cause="Signal")
    assert stop_of(Ended(killed, over=OVER, cut=True))[0] is StopReason.MAX_TURNS
    assert stop_of(Ended(killed, cut=True))[0] is StopReason.AGENT_TIMEOUT


@pytest.mark.parametrize(
    ("recorded", "later", "cut"),
    [
        ([], [], False),
        ([intent(0)], [], True),
        ([intent(0), response(0)], [], True),
        ([intent(0), response(0), delivery(0)], [], False),
        ([intent(0), delivery(0, delivered=False)], [], False),
        ([intent(0), response(0), delivery(0), intent(1, parent=0)], [], True),
        ([intent(0), response(0)], [intent(1, parent=0)], False),
        ([intent(0, digest="a")], [intent(1, digest="a")], False),
        ([intent(0, digest="a")], [intent(1, digest="b")], True),
        ([intent(0, digest="a"), intent(1, digest="b")], [intent(2, digest="b")], True),
        ([intent(0), delivery(0), intent(1, parent=0)], [intent(2, parent=0)], False),
    ],
)
def test_call_stays_cut_until_the_program_repeats_or_continues_it(
    recorded: list[Record], later: list[Record], cut: bool
) -> None:
    assert is_cut(recorded, [*recorded, *later]) is cut


@pytest.mark.parametrize(
    ("later", "code", "is_excused"),
    [
        ([], 1, True),
        ([], 0, True),
        ([intent(1, parent=0), response(1), delivery(1)], 1, False),
        ([intent(1, digest="b"), response(1), delivery(1)], 1, True),
        ([intent(1, digest="b"), response(1), delivery(1)], 0, False),
    ],
)
async def test_delayed_call_excuses_a_program_that_gave_it_up(
    later: list[Record], code: int, is_excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = CallError(reason=STORAGE_SILENT, message="storage did not answer for 12 s")
    given_up = DeliveryRecord(turn=0, time=0, delivered=False, error=why)
    program = object.__new__(Program)
    monkeypatch.setattr(program, "records", [intent(0, digest="a"), response(0), given_up, *later], raising=False)
    monkeypatch.setattr(program, "turn", 1 if later else 0, raising=False)
    monkeypatch.setattr(program, "_session_here", None, raising=False)
    assert (program._delayed_call(result(code)) is not None) == is_excused


async def test_program_counts_missed_requests_before_it_probes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the program left running may give up requests during the probe."""
    order: list[str] = []

    async def missed() -> int:
        order.append("missed")
        return 0

    async def ran() -> Ended:
        return Ended(result(1))

    async def probed(error: ModelError) -> None:
        order.append("probe")
        error.answers_others = True

    program = object.__new__(Program)
    own = {
        "_unwritten": [],
        "_recorded": [intent(0)],
        "records": [intent(0)],
        "_run": ran,
        "_probe": probed,
        "_session_here": None,
    }
    model, workspace = SimpleNamespace(unanswered={0}), SimpleNamespace(missed_requests=missed)
    for name, value in {**own, "_session_here": None, "_model": model, "_workspace": workspace}.items():
        monkeypatch.setattr(program, name, value, raising=False)
    assert (await program.run())[0] is StopReason.AGENT_ERROR
    assert order == ["missed", "probe"]

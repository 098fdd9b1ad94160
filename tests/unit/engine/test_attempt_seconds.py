"""The times of an attempt's parts: none is longer than the whole, and a resume does not change recorded ones."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.attempt.results import attempt_seconds
from rollout_api.records import AttemptRecord, IntentRecord, ObservationsRecord, Record, ResponseRecord

seconds = st.floats(0, 1000)
TURNS = st.lists(st.tuples(seconds, seconds, seconds), max_size=6)


def recorded(boot: float, turns: list[tuple[float, float, float]]) -> tuple[list[Record], float]:
    """Return an attempt whose turns have a pause, a model call and tool calls, one after another, and the time of its
    end.
    """
    now = 1_700_000_000.0 + boot
    begun, used = now, 0.0
    records: list[Record] = [AttemptRecord(time=now, runner="r", workspace={}, boot_seconds=boot)]
    for number, (pause, model, tools) in enumerate(turns):
        now += pause
        records.append(IntentRecord(turn=number, time=now, keep=0, messages=[], agent_seconds=used))
        now, used = now + model, used + model
        answer = {"role": "assistant", "content": ""}
        records.append(
            ResponseRecord(
                turn=number, time=now, seconds=model, message=answer, finish_reason="stop", agent_seconds=used
            )
        )
        now, used = now + tools, used + tools
        records.append(ObservationsRecord(turn=number, time=now, seconds=tools, results=[], agent_seconds=used))
    assert used <= now - begun + 1e-3
    return records, now


@given(seconds, TURNS, seconds, st.floats(-1000, 1000))
def test_no_part_of_an_attempt_exceeds_its_total(
    boot: float, turns: list[tuple[float, float, float]], verifier: float, clock_set: float
) -> None:
    records, now = recorded(boot, turns)
    parts = attempt_seconds(records, ended=now + verifier + clock_set, verifier=verifier)
    assert all(0 <= value <= parts["total"] for value in parts.values())
    assert parts["boot"] + parts["agent"] + parts["verifier"] <= parts["total"] + 1e-5


@given(seconds, TURNS, TURNS, seconds)
def test_resume_never_decreases_recorded_times(
    boot: float, before: list[tuple[float, float, float]], after: list[tuple[float, float, float]], gap: float
) -> None:
    records, now = recorded(boot, before)
    first = attempt_seconds(records, ended=now, verifier=0)
    moved = AttemptRecord(time=now + gap, runner="other", workspace={})
    again, end = recorded(boot, [*before, *after])
    position = len(records)
    resumed = attempt_seconds([*again[:position], moved, *again[position:]], ended=end + gap, verifier=0)
    assert resumed["boot"] == first["boot"]
    assert all(resumed[part] >= first[part] - 1e-5 for part in ("agent", "model", "tools", "total"))


def test_tool_calls_one_after_another_take_the_sum_of_their_times() -> None:
    records, now = recorded(0, [(0, 0, 5.0)])
    assert attempt_seconds(records, ended=now, verifier=0)["tools"] == 5.0


def test_model_calls_side_by_side_are_counted_once() -> None:
    records, now = recorded(0, [(0, 10, 0)])
    assert attempt_seconds([*records, records[2]], ended=now, verifier=0)["model"] == 10.0

"""The clock of a call of a ModelServer."""

from agent_runtime.models.pool.call import Call
from agent_runtime.models.pool.gate import CallSpans
from agent_runtime.models.probe import probe_request


def test_time_on_hold_of_an_earlier_call_for_the_request_does_not_slow_the_clock() -> None:
    request = probe_request(seed=0, session="s", task="t", member=0)
    request.health.held_seconds = 100.0
    call = Call(request, started=10.0, spans=CallSpans(began=1, streamed=True))
    call.hold(11.0)
    call.release(13.0)
    assert (call.clock(15.0), request.health.held_seconds) == (3.0, 102.0)

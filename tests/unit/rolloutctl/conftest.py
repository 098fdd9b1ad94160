"""Rollouts as the engine records them, made up: every outcome, forks, cheats, and text that wants to be markup."""

import random
from collections.abc import Callable

import pytest

from rollout_api.records import (
    AttemptRecord,
    AttemptSummary,
    CommandVerdict,
    IntentRecord,
    Observation,
    ObservationsRecord,
    Outcome,
    Record,
    ResponseRecord,
    Result,
    StopReason,
    StopRecord,
    TestVerdict,
    Usage,
    Verdict,
)
from rolloutctl.ui.page import Rollout

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!-- <script> {{script}} {{data}} \u2028 \u2029 &lt;b&gt; ]]>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \u202egnp.exe \ud800",
]


def made_up_rollout(index: int, group_size: int = 8, turns: int = 4, hostile: bool = True) -> Rollout:
    """The rollout of that index; the same index makes the same rollout."""
    chance = random.Random(index)
    group, member = divmod(index, group_size)
    task = f"fix-{['parser', 'cache', 'dates', 'queue', 'matrix'][group % 5]}-{group}"
    start = 1_760_000_000.0 + index
    nasty = HOSTILE[index % len(HOSTILE)] if hostile else "plain text"
    records: list[Record] = [
        AttemptRecord(time=start, runner="host", workspace={}, sandbox={"provider": "Local", "mode": "Overlay"})
    ]
    prompt = f"Function `{task}` returns the wrong result for empty input. Find out why and mend it.\n\n{nasty}"
    answers: list[Usage] = []
    for turn in range(turns):
        new = (
            [{"role": "system", "content": "You work in a sandbox."}, {"role": "user", "content": prompt}]
            if turn == 0
            else [{"role": "tool", "tool_call_id": f"c{turn - 1}", "content": "seen above"}]
        )
        records.append(IntentRecord(turn=turn, time=start + turn, keep=2 * turn, messages=new))
        usage = Usage(prompt_tokens=400 + 310 * turn, completion_tokens=60 + chance.randrange(80))
        answers.append(usage)
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {
                "name": "bash",
                "arguments": '{"command": "cat src/module.py && python -m pytest -q", "timeout": 60}',
            },
        }
        records.append(
            ResponseRecord(
                turn=turn,
                time=start + turn + 0.5,
                seconds=0.3 + chance.random() * 4,
                message={"role": "assistant", "content": f"Step {turn}: I look at it. {nasty}", "tool_calls": [call]},
                finish_reason="tool_calls",
                usage=usage,
            )
        )
        body = "\n".join(f"line {n}: value = compute({chance.randrange(1000)}, {n})" for n in range(30))
        records.append(
            ObservationsRecord(
                turn=turn,
                time=start + turn + 0.8,
                results=[
                    Observation(
                        call_id=f"c{turn}",
                        tool="bash",
                        content=f"{body}\n{nasty}\nneedle-{index}",
                        error=turn == 2 and index % 5 == 0,
                        seconds=chance.random(),
                    )
                ],
            )
        )
    records.append(StopRecord(time=start + turns, stop_reason=StopReason.FINISHED, agent_seconds=float(turns)))
    outcome = chance.choices(
        [Outcome.COMPLETED, Outcome.INFRA_FAILED, Outcome.VERIFIER_FAILED, Outcome.CANCELLED], [94, 3, 1, 2]
    )[0]
    completed = outcome is Outcome.COMPLETED
    reward = chance.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.0]) if completed else None
    stop = chance.choices(
        [StopReason.FINISHED, StopReason.MAX_TURNS, StopReason.TOOL_FORMAT, StopReason.AGENT_TIMEOUT], [80, 10, 6, 4]
    )[0]
    verdict = None
    if completed and reward is not None:
        verdict = Verdict(
            reward=reward,
            passed=reward == 1,
            commands=[
                CommandVerdict(
                    command="python -m pytest -q",
                    exit_code=0 if reward == 1 else 1,
                    seconds=1.2,
                    output=nasty + "\n4 ran",
                )
            ],
            tests=[
                TestVerdict(name=f"test_module.py::test_{n}", passed=n < reward * 4, message="assert 0 == 1")
                for n in range(4)
            ],
            dropped=["conftest.py"] if index % 11 == 0 else [],
        )
    result = Result(
        index=index,
        group=group,
        member=member,
        task=task,
        tags=["easy" if group % 2 else "hard"],
        mode="Train",
        seed=index * 7919,
        outcome=outcome,
        stop_reason=stop if completed else None,
        reason=None if completed else "SandboxLost",
        message="" if completed else f"the sandbox's node went away {nasty}",
        reward=reward,
        passed=None if reward is None else reward == 1,
        attempt=0 if completed else 2,
        failed_attempts=[] if completed else [AttemptSummary(attempt=0, reason="SandboxLost", message="node lost")],
        turns=turns,
        tool_calls=turns,
        usage=Usage(
            prompt_tokens=sum(u.prompt_tokens for u in answers),
            completion_tokens=sum(u.completion_tokens for u in answers),
        ),
        seconds={"boot": 0.02, "model": 6.5, "tools": 2.0, "verifier": 1.2, "total": 10 + chance.random() * 30},
        started=start,
        ended=start + 40,
    )
    return Rollout(result, records, verdict)


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """Makes the rollout of an index."""
    return made_up_rollout

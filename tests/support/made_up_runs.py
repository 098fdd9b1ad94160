"""Invented runs, recorded like the engine's: every outcome, forks, cheats, and text with markup."""

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime.engine.attempt.results import attempt_seconds
from agent_runtime.recording.branches import Branch, encode_branches
from agent_runtime.recording.results import result_line, statistics_of, stats_json
from agent_runtime.recording.segments import compress, encode, json_bytes
from rollout_api.records import (
    ArtifactsRecord,
    AttemptRecord,
    AttemptSummary,
    ChangesRecord,
    CommandVerdict,
    IntentRecord,
    ObjectDigest,
    Observation,
    ObservationsRecord,
    Outcome,
    Record,
    ResponseRecord,
    Result,
    Seal,
    StopReason,
    StopRecord,
    TestVerdict,
    Usage,
    Verdict,
)
from rolloutctl.viewer.rollout import Rollout

BEGAN = 1_760_000_000.0
CHANGES = """\
--- a/src/module.py
+++ b/src/module.py
@@ -1,2 +1,2 @@
 def f(x):
-    return x + 1
+    return x
--- a/src/old.py
+++ /dev/null
@@ -1,1 +0,0 @@
-import module"""


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "<!-- <script> {{script}} {{data}} \u2028 \u2029 &lt;b&gt; ]]>",
    "[a](https://evil.example/?q=secret) [b](javascript:hacked=6) ![c](https://evil.example/x.png) <b onclick=hacked=7>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \u202egnp.exe \ud800",
]


def made_up_rollout(
    index: int, group_size: int = 8, turns: int = 4, hostile: bool = True, began: float = BEGAN
) -> Rollout:
    """Return the rollout of that index; equal indices give equal rollouts."""
    chance = random.Random(index)
    group, member = divmod(index, group_size)
    task = task_name(group)
    start = began + index
    now = start + 0.02
    nasty = HOSTILE[index % len(HOSTILE)] if hostile else "plain text"
    records: list[Record] = [
        AttemptRecord(
            time=now,
            runner=f"host-{index}",
            workspace={},
            sandbox={"provider": "Local", "mode": "Overlay"},
            boot_seconds=0.02,
        )
    ]
    prompt = f"Function `{task}` returns the wrong result for empty input. Find out why and mend it.\n\n{nasty}"
    answers: list[Usage] = []
    for turn in range(turns):
        new = (
            [{"role": "system", "content": "You work in a sandbox."}, {"role": "user", "content": prompt}]
            if turn == 0
            else [{"role": "tool", "tool_call_id": f"c{turn - 1}", "content": "seen above"}]
        )
        records.append(IntentRecord(turn=turn, time=now, keep=2 * turn + 1 if turn else 0, messages=new))
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
        answering = 0.3 + chance.random() * 9
        now += answering
        records.append(
            ResponseRecord(
                turn=turn,
                time=now,
                seconds=answering,
                message={"role": "assistant", "content": f"Step {turn}: I look at it. {nasty}", "tool_calls": [call]},
                finish_reason="tool_calls",
                usage=usage,
            )
        )
        body = "\n".join(f"line {n}: value = compute({chance.randrange(1000)}, {n})" for n in range(30))
        calling = chance.random()
        now += calling
        records.append(
            ObservationsRecord(
                turn=turn,
                time=now,
                seconds=calling,
                results=[
                    Observation(
                        call_id=f"c{turn}",
                        tool="bash",
                        content=f"{body}\n{nasty}\nneedle-{index}",
                        error=turn == 2 and index % 5 == 0,
                        seconds=calling,
                    )
                ],
            )
        )
    outcome = chance.choices(
        [Outcome.COMPLETED, Outcome.INFRA_FAILED, Outcome.VERIFIER_FAILED, Outcome.CANCELLED], [94, 3, 1, 2]
    )[0]
    completed = outcome is Outcome.COMPLETED
    reward = chance.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.0]) if completed else None
    stop = chance.choices(
        [StopReason.FINISHED, StopReason.MAX_TURNS, StopReason.TOOL_FORMAT, StopReason.AGENT_TIMEOUT], [80, 10, 6, 4]
    )[0]
    records.append(StopRecord(time=now, stop_reason=stop, agent_seconds=now - start - 0.02))
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
        dropped=len(verdict.dropped) if verdict else 0,
        attempt=0 if completed else 2,
        failed_attempts=[] if completed else [AttemptSummary(attempt=0, reason="SandboxLost", message="node lost")],
        turns=turns,
        tool_calls=turns,
        usage=Usage(
            prompt_tokens=sum(u.prompt_tokens for u in answers),
            completion_tokens=sum(u.completion_tokens for u in answers),
        ),
        seconds=attempt_seconds(records, ended=now + 1.2, verifier=1.2),
        started=start,
        ended=now + 1.2,
    )
    return Rollout(records, result, verdict)


def manifest(name: str, count: int, group_size: int, **spec: Any) -> dict[str, Any]:
    """Return the manifest of an invented run."""
    tasks = [{"name": task_name(group), "prompt": "Mend it."} for group in range(-(-count // group_size))]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Train",
            "tasks": {"inline": tasks[:4]},
            "model": {
                "endpoint": {"baseURL": "http://127.0.0.1:1/v1", "name": "</title><script>window.hacked = 3</script>"},
                "prices": {"prompt": 2.0, "completion": 8.0},
            },
            "groupSize": group_size,
            "output": {"uri": "out"},
        }
        | spec,
    }


def write_run(
    output: Path,
    name: str,
    rollouts: Sequence[Rollout],
    *,
    group_size: int = 8,
    total: int | None = None,
    finished: bool = True,
    aborted: str = "",
    created: float = BEGAN,
    **spec: Any,
) -> Path:
    """Write a run of invented rollouts with artifacts and tokens; return its folder."""
    whole = total or len(rollouts)
    uid = hashlib.sha256(name.encode()).hexdigest()[:8] + "-0000"
    folder = output / f"{name}-{uid[:8]}"
    (folder / "seals").mkdir(parents=True)
    names = [task_name(group) for group in range(-(-whole // group_size))]
    job = {
        "version": 1,
        "uid": uid,
        "created": created,
        "manifest": manifest(name, whole, group_size, **spec),
        "tasks": {"count": len(names), "digest": "0" * 64, "names": names},
    }
    (folder / "job.json").write_text(json.dumps(job))
    for rollout in rollouts:
        write_rollout(folder, rollout)
    if aborted:
        (folder / "abort.json").write_text(json.dumps({"reason": "Aborted", "message": aborted, "time": created}))
    if finished:
        results = [rollout.result for rollout in rollouts if rollout.result]
        (folder / "stats.json").write_bytes(stats_json(statistics_of(results)))
    return folder


def write_rollout(folder: Path, rollout: Rollout) -> None:
    """Write the records and the seal of a rollout. Without a result it is in flight."""
    result = rollout.result
    index = in_flight_index(rollout) if result is None else result.index
    attempt = 0 if result is None else result.attempt
    files = folder / "attempts" / str(index) / str(attempt)
    files.mkdir(parents=True)
    (files / "epoch-1.json").write_text('{"epoch":1,"holder":"h"}')
    archive = _archive()
    key = f"attempts/{index}/{attempt}/1-artifacts.tar.zst"
    records = [*rollout.records]
    if result is not None:
        records += [ArtifactsRecord(time=0, key=key, bytes=len(archive)), ChangesRecord(time=0, diff=CHANGES)]
    objects = {
        f"attempts/{index}/{attempt}/{'1-0' if result is None else '1-1-records'}.jsonl.zst": encode(records),
        key: compress(archive),
        f"attempts/{index}/{attempt}/1-tokens.jsonl.zst": encode_branches([_tokens(index)]),
    }
    for name, data in objects.items():
        if result is not None or name.endswith("1-0.jsonl.zst"):
            (folder / name).write_bytes(data)
    if result is not None:
        digests = [
            ObjectDigest(key=name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
            for name, data in objects.items()
        ]
        seal = Seal(result=result, verdict=rollout.verdict, objects=digests)
        (folder / "seals" / f"{index}.json").write_bytes(json_bytes(seal))


def write_bare_run(output: Path, name: str, rollouts: int, group_size: int = 8) -> Path:
    """Write a finished run of many rollouts whose records are missing, except those of the first group."""
    first = [made_up_rollout(index, group_size, hostile=False) for index in range(group_size)]
    folder = write_run(output, name, first, group_size=group_size, total=rollouts, finished=False)
    (folder / "results-index").mkdir()
    results: list[Result] = []
    for index in range(group_size, rollouts):
        result = made_up_rollout(index, group_size, turns=1, hostile=False).result
        assert result is not None
        results.append(result)
        # A seal whose result is in the index is not read.
        (folder / "seals" / f"{index}.json").touch()
    for start in range(0, len(results), 500):
        lines = b"".join(map(result_line, results[start : start + 500]))
        (folder / "results-index" / f"{hashlib.sha256(lines).hexdigest()}.jsonl.zst").write_bytes(compress(lines))
    (folder / "stats.json").write_bytes(stats_json(statistics_of(results)))
    return folder


def task_name(group: int) -> str:
    """Return the name of an invented task."""
    return f"fix-{['parser', 'cache', 'dates', 'queue', 'matrix'][group % 5]}-{group}"


def in_flight_index(rollout: Rollout) -> int:
    """Return the index of a rollout without a result, which `made_up_rollout` writes into the name of the runner."""
    first = rollout.records[0]
    assert isinstance(first, AttemptRecord)
    return int(first.runner.removeprefix("host-"))


def _archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, data in {"src/module.py": b"def f(x):\n    return x\n", "data.bin": b"\0\1"}.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _tokens(index: int) -> Branch:
    ids, mask = [5, 6, 7, 100 + index, 101, 102, 8], [0, 0, 0, 1, 1, 1, 0]
    return Branch(
        token_ids=ids,
        mask=mask,
        logprobs=[0.0, 0.0, 0.0, -0.1, -2.5, -0.01, 0.0],
        policy_versions=[None, None, None, "3", "3", "3", None],
    )

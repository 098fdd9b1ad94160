"""An unmodified program in the sandbox is the agent: what is recorded of it, and the attribution of its end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.engine.program.program_rules import CALLS_A_TURN
from agent_runtime.engine.run import run_job
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.models import probe
from agent_runtime.models.base import ModelError, ModelReply, ModelRequest
from agent_runtime.proxy import session
from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.records import IntentRecord
from rollout_api.rollout_job import RolloutJob
from tests.support.full import MODES_ONCE
from tests.support.speller import Speller
from tests.support.talking_program import TALKING, exported, one_conversation
from tests.support.vllm_server import Answer, Faults, Prompt, Script, VllmStandIn

ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]
MODES = ("Overlay", "Plain")

# Asks like an ordinary script: one question after another, with streamed answers that are sent back in the next
# request.
OPENAI = """
import openai, sys
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": sys.argv[1]}]
for number in range(int(sys.argv[3])):
    text = ""
    with client.chat.completions.create(model=sys.argv[2], messages=messages, stream=True) as stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    print(text, file=open("answers.txt", "a"))
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
print("all is answered")
"""


@dataclass
class Ran:
    """A run and what it recorded of rollout 0."""

    reader: RunReader
    results: list[dict[str, Any]]

    @property
    def end(self) -> tuple[str, str | None]:
        """Return the outcome, and the stop reason or the reason, of rollout 0."""
        result = self.results[0]
        return result["outcome"], result.get("stopReason") or result.get("reason")

    async def branches(self) -> list[Branch]:
        """Return the training data of rollout 0."""
        return await self.reader.tokens(0)


def manifest(folder: Path, server: VllmStandIn, program: str, command: Sequence[str], **spec: Any) -> dict[str, Any]:
    files = [{"path": "agent.py", "content": program}]
    task = {"name": "talk", "prompt": "Say {model}.", "files": files, **spec.pop("task", {})}
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "program"},
        "spec": {
            "mode": "Train",
            "tasks": {"inline": [task]},
            "model": {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy", "callSeconds": 120}},
            "sampling": {"maxTokens": 40},
            "sandbox": {"workspaces": {"mode": spec.pop("workspaces", "Overlay")}},
            "attempts": {"limit": 1, "backoffSeconds": 0},
            "completion": {"maxInfraFailureFraction": 1.0},
            "output": {"uri": str(folder / "out")},
            **spec,
            "agent": {"type": "Command", "command": list(command), **spec.get("agent", {})},
        },
    }


async def read(folder: Path, run: str) -> Ran:
    reader = await open_run(Store.open(str(folder / "out"), {}), run)
    return Ran(reader, [result.wire() for result in reader.results()])


async def run(
    folder: Path, server: VllmStandIn, program: str, *arguments: str, python: str = sys.executable, **spec: Any
) -> Ran:
    job = RolloutJob.model_validate(manifest(folder, server, program, [python, "agent.py", *arguments], **spec))
    summary = await run_job(job, base_dir=folder, environ={})
    return await read(folder, summary.folder)


@pytest.fixture
async def server() -> AsyncIterator[VllmStandIn]:
    async with VllmStandIn() as standing:
        yield standing


async def test_program_is_trained_on_exactly_its_servers_tokens(tmp_path: Path, server: VllmStandIn) -> None:
    task = {"verifier": {"commands": ['test "$(wc -l < answers.txt)" -ge 5']}}
    ran = await run(tmp_path, server, OPENAI, "{prompt}", "{model}", "5", task=task, groupSize=2)
    assert [(result["stopReason"], result["reward"], result["message"]) for result in ran.results] == [
        ("Finished", 1, "all is answered")
    ] * 2
    for index, result in enumerate(ran.results):
        requests = server.served_in(f"rollout-{index}-0")
        (branch,) = await ran.reader.tokens(index)
        assert exported(branch) == one_conversation(requests)
        assert (len(requests), result["turns"], result["tokenForks"]) == (5, 5, 0)
        assert (result["tokenCapture"], result["usage"]["completionTokens"]) == (
            "Tokens",
            sum(len(request.ids) for request in requests),
        )
        records = await ran.reader.records(index)
        first = next(record for record in records if isinstance(record, IntentRecord))
        assert first.messages == [{"role": "user", "content": "Say {model}."}], "a prompt is not filled in itself"


@pytest.mark.parametrize("mode", MODES)
async def test_program_in_either_mode_gets_its_prompt_and_its_model(
    tmp_path: Path, server: VllmStandIn, mode: str
) -> None:
    install = ["cp agent.py installed.py"]
    command = ["sh", "-c", 'program=$PWD/installed.py; cd /tmp; exec python3 $program "$0" 2', "{promptFile}"]
    spec = {"agent": {"install": install}, "workspaces": mode}
    program = TALKING.replace('open("answers.txt"', "open(os.devnull")
    job = RolloutJob.model_validate(manifest(tmp_path, server, program, command, **spec))
    summary = await run_job(job, base_dir=tmp_path, environ={})
    ran = await read(tmp_path, summary.folder)
    assert (ran.end, ran.results[0]["sandbox"]["mode"]) == (("Completed", "Finished"), mode), ran.results
    requests = server.served_in("rollout-0-0")
    (branch,) = await ran.branches()
    assert (len(requests), exported(branch)) == (2, one_conversation(requests))


SLOW = Answer("Let me see what there is to say of that, word by word, as slowly as one can. " * 2)


def slow(begun: asyncio.Queue[int]) -> Script:
    """Give long answers, and put each request into the queue."""

    def script(prompt: Prompt) -> Answer | None:
        if not prompt.session:
            return None
        begun.put_nowait(prompt.turn)
        return Answer("Let me see what there is to say of that, word by word, as slowly as one can. " * 2)

    return script


async def run_killed_in(folder: Path, server: VllmStandIn, begun: asyncio.Queue[int], *turns: int) -> Ran:
    """Run `rolloutctl run` with a kill in the middle of the answer of each of these turns, then to its end."""
    for turn in (*turns, None):
        process = await asyncio.create_subprocess_exec(
            *ROLLOUTCTL, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        if turn is not None:
            async with asyncio.timeout(300):
                while await begun.get() < turn:
                    pass
                server.faults.hang_after = 20  # the answer does not end before its runner does
                await asyncio.sleep(0.5)
            process.send_signal(signal.SIGKILL)
        output, errors = await process.communicate()
        server.faults.hang, server.faults.hang_after = False, None
        server.engine.look()
    assert process.returncode == 0, errors.decode()[-3000:]
    return await read(folder, json.loads(output)["folder"])


@pytest.mark.parametrize("mode", MODES_ONCE)
async def test_program_continues_when_its_runners_are_killed_without_losing_a_turn(tmp_path: Path, mode: str) -> None:
    """Two runners are killed during an answer to the program, which sends the request again and continues."""
    begun = asyncio.Queue[int]()
    async with VllmStandIn(script=slow(begun), tokens_per_second=300) as server:
        command = ["python3", "agent.py", "{promptFile}", "6"]
        checks = ['test "$(cat answers.txt | xargs)" = "0 1 2 3 4 5"', 'test "$(wc -l < broken.txt)" -le 2']
        spec = {"workspaces": mode, "task": {"verifier": {"commands": checks}}, "sampling": {"maxTokens": 60}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest(tmp_path, server, TALKING, command, **spec)))
        ran = await run_killed_in(tmp_path, server, begun, 1, 3)
        requests = server.served_in("rollout-0-0")
    result = ran.results[0]
    assert (ran.end, result["attempt"], result["reward"], result["turns"]) == (("Completed", "Finished"), 0, 1, 6)
    assert [request.finish for request in requests].count("abort") == 2, "nobody waited for those any more"
    records = await ran.reader.records(0)
    used = [record.agent_seconds or 0.0 for record in records if isinstance(record, IntentRecord)]
    assert used == sorted(used), "each runner goes on counting where the last one ended"
    assert used[1] > 0
    (branch,) = await ran.branches()
    assert exported(branch) == one_conversation(requests)


async def test_program_that_gives_up_because_its_runner_died_uses_up_no_attempt(tmp_path: Path) -> None:
    begun = asyncio.Queue[int]()
    async with VllmStandIn(script=slow(begun), tokens_per_second=300) as server:
        command = [sys.executable, "agent.py", "{prompt}", "{model}", "2"]
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest(tmp_path, server, OPENAI, command)))
        ran = await run_killed_in(tmp_path, server, begun, 1)
        requests = server.served_in("rollout-0-1")
    assert (ran.end, ran.results[0]["attempt"]) == (("Completed", "Finished"), 1)
    assert [failed["reason"] for failed in ran.results[0]["failedAttempts"]] == ["Interrupted"]
    (branch,) = await ran.branches()
    assert exported(branch) == one_conversation(requests)


async def test_draining_runner_breaks_no_answer_and_the_next_one_continues(tmp_path: Path) -> None:
    begun, drain = asyncio.Queue[int](), Drain()
    async with VllmStandIn(script=slow(begun), tokens_per_second=200) as server:
        command = ["python3", "agent.py", "{promptFile}", "4"]
        task = {"verifier": {"commands": ["test ! -e broken.txt", 'test "$(cat answers.txt | xargs)" = "0 1 2 3"']}}
        job = RolloutJob.model_validate(manifest(tmp_path, server, TALKING, command, task=task))
        first = asyncio.create_task(run_job(job, base_dir=tmp_path, environ={}, drain=drain))
        while await begun.get() < 1:
            pass
        drain.request()
        assert (await first).resumable
        drained = len(server.served_in("rollout-0-0"))
        summary = await run_job(job, base_dir=tmp_path, environ={})
        requests = server.served_in("rollout-0-0")
    ran = await read(tmp_path, summary.folder)
    assert (ran.end, ran.results[0]["attempt"], ran.results[0]["reward"]) == (("Completed", "Finished"), 0, 1)
    assert drained == 2, "the turn that was under way was finished, and none begun after it"
    (branch,) = await ran.branches()
    assert exported(branch) == one_conversation(requests)


ASK = """
import json, os, sys, time, urllib.error, urllib.request

def ask(text="Hi", timeout=60, **fields):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}], **fields}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout).status
    except urllib.error.HTTPError as error:
        return error.code

"""


@pytest.mark.parametrize(
    ("program", "end", "message"),
    [
        ("ask()\nsys.exit('out of ideas')", ("Completed", "AgentError"), "ended with exit code 1: out of ideas"),
        ("ask()\nos.kill(os.getpid(), 9)", ("Completed", "AgentError"), "ended with signal 9"),
        ("ask()\nprint('fine')", ("Completed", "Finished"), "fine"),
        ("time.sleep(600)", ("Completed", "AgentTimeout"), "timeouts.agentSeconds 2 ran out"),
        ("sys.exit(ask('Hi ' * 40_000) == 400)", ("Completed", "ContextExceeded"), "refused the agent"),
    ],
)
async def test_failure_of_the_program_itself_is_graded(
    tmp_path: Path, server: VllmStandIn, program: str, end: tuple[str, str], message: str
) -> None:
    seconds = 2 if end[1] == "AgentTimeout" else 120
    task = {"verifier": {"commands": ["true"]}, "timeouts": {"agentSeconds": seconds}}
    ran = await run(tmp_path, server, ASK + program, python="python3", task=task)
    assert (ran.end, ran.results[0]["reward"]) == (end, 1)
    assert message in ran.results[0]["message"]


async def test_missing_program_gives_no_reward(tmp_path: Path, server: VllmStandIn) -> None:
    ran = await run(tmp_path, server, "", python="no-such-agent")
    assert ran.end == ("InfraFailed", "AgentNotStarted")
    assert "no-such-agent" in ran.results[0]["message"]


@pytest.mark.parametrize("ending", ["sys.exit(status == 502)", "print('sorry')"])
async def test_program_that_ends_because_its_server_failed_is_an_infrastructure_failure(
    tmp_path: Path, server: VllmStandIn, ending: str
) -> None:
    def break_down(prompt: Prompt) -> Answer | None:
        if prompt.session:
            server.faults = server.engine.faults = Faults(status=500)
        return None

    server.script = break_down
    program = f"{ASK}ask()\nstatus = ask()\n{ending}"
    model = {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy", "callSeconds": 3}}
    ran = await run(tmp_path, server, program, python="python3", model=model)
    assert ran.end == ("InfraFailed", "ServerError"), ran.results
    assert "reward" not in ran.results[0]


class Firewalled(Speller):
    """Fails for requests with one word, and for no others."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        if "forbidden" in str(request.messages):
            raise ModelError("ServerError", "status 500")
        return await super().complete(request)


async def test_a_program_whose_request_makes_the_server_fail_is_graded(tmp_path: Path, server: VllmStandIn) -> None:
    program = ASK + "ask()\nsys.exit(ask('forbidden') == 502)"
    job = manifest(tmp_path, server, program, ["python3", "agent.py"])
    summary = await run_job(RolloutJob.model_validate(job), base_dir=tmp_path, environ={}, model=Firewalled())
    ran = await read(tmp_path, summary.folder)
    assert ran.end == ("Completed", "AgentError"), ran.results
    assert [failed["reason"] for failed in ran.results[0]["failedAttempts"]] == ["ServerError"]


def running(argument: str) -> list[int]:
    """Return the ids of the processes that have this argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


async def test_program_that_gives_up_because_its_runner_stood_still_uses_up_no_attempt(tmp_path: Path) -> None:
    begun = asyncio.Queue[int]()
    async with VllmStandIn(script=slow(begun), tokens_per_second=300) as server:
        job = manifest(tmp_path, server, ASK + "ask(timeout=6)", [sys.executable, "agent.py"])
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        process = await asyncio.create_subprocess_exec(*ROLLOUTCTL, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(300):
            await begun.get()
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(10)  # longer than the program waits, and than `OWN_SECONDS`
        process.send_signal(signal.SIGCONT)
        output, _ = await process.communicate()
    ran = await read(tmp_path, json.loads(output)["folder"])
    assert (ran.end, ran.results[0]["attempt"]) == (("Completed", "Finished"), 1), ran.results
    assert [failed["reason"] for failed in ran.results[0]["failedAttempts"]] == ["Interrupted"]


async def test_program_that_gives_up_without_a_runner_is_retried(tmp_path: Path) -> None:
    asked, drain, mark = asyncio.Event(), Drain(), uuid.uuid4().hex

    async def before(_question: int, letter: int) -> None:
        asked.set()
        if letter == 0 and first.done():  # the next attempt has a runner all the time
            wake()

    def wake() -> int:
        found = running(mark)
        for program_id in found:
            os.kill(program_id, signal.SIGUSR1)
        return len(found)

    # It asks again only when its runner is away, and for longer than the executor counts as an absence (ABSENT_SECONDS).
    program = ASK + (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nask()\n"
        "signal.sigwait([signal.SIGUSR1])\nask('And now?', timeout=6)"
    )
    async with VllmStandIn() as server:
        job = RolloutJob.model_validate(manifest(tmp_path, server, program, ["python3", "agent.py", mark]))
        model = Speller(before=before)
        first = asyncio.create_task(run_job(job, base_dir=tmp_path, environ={}, drain=drain, model=model))
        await asked.wait()
        drain.request()
        assert (await first).resumable
        assert wake() == 1
        async with asyncio.timeout(300):
            while await asyncio.to_thread(running, mark):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        summary = await run_job(job, base_dir=tmp_path, environ={}, model=model)
    ran = await read(tmp_path, summary.folder)
    assert (ran.end, ran.results[0]["attempt"]) == (("Completed", "Finished"), 1), ran.results
    assert [failed["reason"] for failed in ran.results[0]["failedAttempts"]] == ["Interrupted"]


class Unwell(Speller):
    """Fails once, at the second question of one conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 1

    async def complete(self, request: ModelRequest) -> ModelReply:
        if "Go on" in str(request.messages) and self.failures:
            self.failures -= 1
            raise ModelError("Timeout", "no answer came")
        return await super().complete(request)


async def test_a_failed_call_excuses_a_program_although_another_call_was_answered(
    tmp_path: Path, server: VllmStandIn
) -> None:
    program = ASK + "ask()\nstatus = ask('Go on')\nask('Another worker')\nsys.exit(status != 200)"
    job = manifest(tmp_path, server, program, ["python3", "agent.py"], attempts={"limit": 2, "backoffSeconds": 0})
    summary = await run_job(RolloutJob.model_validate(job), base_dir=tmp_path, environ={}, model=Unwell())
    ran = await read(tmp_path, summary.folder)
    assert ran.end == ("Completed", "Finished"), ran.results
    assert [failed["reason"] for failed in ran.results[0]["failedAttempts"]] == ["Timeout"]


class OnePlace(Speller):
    """Answers one call at a time; the answer to a program never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.place = asyncio.Lock()

    async def complete(self, request: ModelRequest) -> ModelReply:
        async with self.place:
            if "endless" in str(request.messages):
                await asyncio.Event().wait()
            return await super().complete(request)


async def test_a_program_whose_own_calls_occupy_the_whole_server_is_graded(
    tmp_path: Path, server: VllmStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 2.0)
    task = {"timeouts": {"agentSeconds": 3}}
    job = manifest(tmp_path, server, ASK + "ask('endless')", ["python3", "agent.py"], task=task)
    summary = await run_job(RolloutJob.model_validate(job), base_dir=tmp_path, environ={}, model=OnePlace())
    assert (await read(tmp_path, summary.folder)).end == ("Completed", "AgentTimeout")


class Hung(Speller):
    """Answers one call. Later calls hang, except a probe if `is_well`, which first waits behind the gate of a policy
    update.
    """

    def __init__(self, *, is_well: bool) -> None:
        super().__init__()
        self.is_well = is_well

    async def complete(self, request: ModelRequest) -> ModelReply:
        if self.is_well and "Say ok" in str(request.messages):
            request.health.on_hold(True)
            await asyncio.sleep(1.5)  # longer than PROBE_SECONDS
            request.health.on_hold(False)
        elif request.messages[-1]["content"] != "Hi":
            await asyncio.Event().wait()
        return await super().complete(request)


@pytest.mark.parametrize(("is_well", "end"), [(False, ("InfraFailed", "Timeout")), (True, ("Completed", "AgentError"))])
async def test_program_that_times_out_is_excused_if_the_model_answers_no_other_request(
    is_well: bool, end: tuple[str, str], tmp_path: Path, server: VllmStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 1.0)
    program = ASK + "ask()\nask('Are you there?', timeout=1)"
    job = manifest(tmp_path, server, program, ["python3", "agent.py"])
    summary = await run_job(RolloutJob.model_validate(job), base_dir=tmp_path, environ={}, model=Hung(is_well=is_well))
    ran = await read(tmp_path, summary.folder)
    assert (ran.end, ran.results[0]["attempt"]) == (end, 0), ran.results


class Held(Speller):
    """Holds every call behind a shut gate."""

    held = 0.0

    async def complete(self, request: ModelRequest) -> ModelReply:
        began = time.monotonic()
        request.health.on_hold(True)
        await asyncio.sleep(4)
        request.health.on_hold(False)
        self.held += time.monotonic() - began
        return await super().complete(request)


async def test_time_behind_a_shut_gate_does_not_count_for_the_program(tmp_path: Path, server: VllmStandIn) -> None:
    model, began = Held(), time.monotonic()
    job = manifest(tmp_path, server, ASK + "ask('question')\nask('question')", ["python3", "agent.py"])
    summary = await run_job(RolloutJob.model_validate(job), base_dir=tmp_path, environ={}, model=model)
    ran = await read(tmp_path, summary.folder)
    assert ran.end == ("Completed", "Finished")
    assert ran.results[0]["seconds"]["agent"] <= time.monotonic() - began - model.held


@pytest.mark.parametrize(
    ("agent", "reason"), [({"maxTurns": 2}, "MaxTurns"), ({"tokenBudget": 60}, "TokenBudget"), ({}, "Finished")]
)
async def test_program_over_its_budget_gets_an_error_and_is_then_ended(
    tmp_path: Path, server: VllmStandIn, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(session, "GRACE_SECONDS", 4)  # in which the program has to be told of all its turns
    program = (
        ASK + "told = [ask() for _ in range(8)]\nopen('told', 'w').write(str(told))\nif 403 in told: time.sleep(60)"
    )
    ran = await run(
        tmp_path, server, program, python="python3", agent=agent, task={"verifier": {"commands": ["cat told"]}}
    )
    assert ran.end == ("Completed", reason)
    seal = json.loads((tmp_path / "out" / ran.reader.folder / "seals" / "0.json").read_text())
    told = json.loads(seal["verdict"]["commands"][0]["output"])
    turns = ran.results[0]["turns"]
    assert told == [200] * turns + [403] * (8 - turns)
    assert turns == {"MaxTurns": 2, "Finished": 8}.get(reason, turns) <= 8


async def test_program_that_exits_at_the_budget_error_ends_with_max_turns(tmp_path: Path, server: VllmStandIn) -> None:
    program = ASK + "while ask() == 200: pass\nsys.exit(1)"
    ran = await run(tmp_path, server, program, python="python3", agent={"maxTurns": 3})
    assert (ran.end, ran.results[0]["turns"]) == (("Completed", "MaxTurns"), 3)


HOSTILE = r"""
import socket, threading
port = int(os.environ["ANTHROPIC_BASE_URL"].rpartition(":")[2])

def send(data, wait=True):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        if wait:
            connection.recv(100)

def request(body, key="sk-rollout-0-0." + "x" * 43):
    return (f"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}").encode()

assert ask() == 200
for nonsense in (b"\x00" * 1000 + b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /../../metrics HTTP/1.1\r\nHost: m\r\n\r\n",
                 request("{}"), request("{}", os.environ["OPENAI_API_KEY"]), request("[" * 100_000)):
    send(nonsense)
told = [ask(model="other"), ask(messages="no"), ask(max_tokens=-1), ask(tools=[{"type": 5}]), ask(n=1000)]
assert all(400 <= status < 500 for status in told), told
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "given up"}]})
while ask() != 403:
    for _ in range(5):
        send(request(body, os.environ["OPENAI_API_KEY"]), wait=False)
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(0.05)
        try: ask()
        except OSError: pass
        open("/tmp/still-here", "w").write(str(time.time()))
"""


async def test_hostile_program_harms_only_itself(
    tmp_path: Path, server: VllmStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    task = {"verifier": {"commands": ["test ! -e /tmp/still-here"]}}
    ran = await run(tmp_path, server, ASK + HOSTILE, python="python3", agent={"maxTurns": 4}, task=task)
    assert ran.end == ("Completed", "Finished"), ran.results[0]["message"]
    (result,) = ran.results
    assert (result["reward"], result["turns"] <= 4) == (1, True)
    assert len([record for record in await ran.reader.records(0) if record.type == "intent"]) <= 4
    assert [record.getMessage() for record in caplog.records if record.levelname not in ("INFO", "DEBUG")] == []
    journaled = await AttemptFolder.of_rollout(ran.reader.store, 0, 0).records()
    assert sum(isinstance(record, IntentRecord) for record in journaled) <= CALLS_A_TURN * 4


# Asks once. Then code written by the model claims, with the agent's key, that no client received the answer.
MASKS_ITSELF = """
import json, os, sys, urllib.error, urllib.request
import openai
client = openai.OpenAI(max_retries=0)
client.chat.completions.create(
    model=sys.argv[1],
    messages=[{"role": "user", "content": "Do the task."}],
    extra_headers={"x-session-proxy-forwarded": "1"},
)
key, url = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
session = key.removeprefix("sk-").rpartition(".")[0]
headers = {"Authorization": f"Bearer {key}", "x-session-proxy-forwarded": "1"}
body = json.dumps({"delivered": False}).encode()
try:
    urllib.request.urlopen(urllib.request.Request(f"{url}/sessions/{session}/turns/0", body, headers))
except urllib.error.HTTPError as error:
    print(error.code)
"""


async def test_policy_code_cannot_take_its_answers_out_of_training(tmp_path: Path, server: VllmStandIn) -> None:
    task = {"verifier": {"commands": ["false"]}}
    ran = await run(tmp_path, server, MASKS_ITSELF, "{model}", workspaces="Plain", task=task)
    assert (ran.results[0]["reward"], ran.results[0]["turns"]) == (0.0, 1)
    assert [sum(branch.mask) > 0 for branch in await ran.branches()] == [True]

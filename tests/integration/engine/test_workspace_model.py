"""An unmodified program in a workspace without network, its model, and a record that is complete whatever is killed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.program.program import WorkspaceModel, serve_model
from agent_runtime.models.base import Model
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.proxy.limits import Limits
from agent_runtime.recording.attempt_folder import AttemptFolder, digest_of
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import CommandResult, Fence, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.model import Sampling
from rollout_api.records import ObjectDigest, Record, ResponseRecord
from rollout_api.sandbox import SandboxTemplate
from tests.support.full import MODES_ONCE
from tests.support.speller import Speller
from tests.support.vllm_server import VllmStandIn

REPOSITORY = Path(__file__).parents[3]
SERVING_RUNNER = Path(__file__).with_name("serving_runner.py")

AGENT = """
import http.client, json, os, urllib.request

def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "stream": True}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    text = ""
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        for line in reply:
            if line.strip() == b"data: [DONE]":
                return text
            if line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                if text:
                    open(f"begun-{number}", "w").close()
    raise http.client.IncompleteRead(text.encode())

messages = []
for number in range(1, 5):
    messages.append({"role": "user", "content": f"question {number}?"})
    for attempt in range(3):
        try:
            answer = ask(messages)
        except (http.client.HTTPException, OSError) as error:
            print(f"question {number} once more, after {type(error).__name__}")
            continue
        break
    print(answer)
    messages.append({"role": "assistant", "content": answer})
"""


async def run_with_kills(folder: Path, mode: str) -> dict[str, object]:
    """Run three runners one after the other; the first two are killed when they ask for it. Returns how the program
    ended.
    """
    for epoch in (1, 2, 3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVING_RUNNER), str(folder), mode, str(epoch),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(300):
            line = (await process.stdout.readline()).decode().strip()
        if epoch < 3:
            assert line == "kill me"
            process.send_signal(signal.SIGKILL)
        await process.wait()
    result: dict[str, object] = json.loads(line)
    return result


@pytest.mark.parametrize("mode", MODES_ONCE)
async def test_program_of_killed_runners_sees_one_broken_answer(tmp_path: Path, mode: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    result = await run_with_kills(tmp_path, mode)
    assert result["exitCode"] == 0, result
    answers = [f"answer {number} of runner {epoch}" for number, epoch in ((1, 1), (2, 2), (3, 3), (4, 3))]
    assert str(result["stdout"]).splitlines() == [
        *answers[:2], "question 3 once more, after IncompleteRead", *answers[2:]
    ]  # fmt: skip
    records = await AttemptFolder.of_rollout(Store.open((tmp_path / "record").as_uri(), {}), 0, 1).records()
    responses = [record for record in records if isinstance(record, ResponseRecord)]
    assert [bytes(response.completion_token_ids or []).decode() for response in responses] == answers
    seen: list[int] = []
    for number, response in enumerate(responses, start=1):
        seen = seen[: response.prompt_keep] + list(response.prompt_token_ids or [])
        assert bytes(seen).decode().endswith(f"question {number}?")
        seen += response.completion_token_ids or []
    conversation = [text for number, answer in enumerate(answers, start=1) for text in (f"question {number}?", answer)]
    assert bytes(seen).decode() == "".join(conversation)


OPENAI = """
import asyncio, os
import anthropic, openai

async def main():
    client = openai.AsyncOpenAI()
    name = os.environ["OPENAI_MODEL"]
    question = [{"role": "user", "content": "question 1?"}]

    async def ask():
        return (await client.chat.completions.create(model=name, messages=question)).choices[0].message.content

    print(await asyncio.gather(*(ask() for _ in range(8))))
    async with await client.chat.completions.create(model=name, messages=question, stream=True) as stream:
        print("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
    claude = anthropic.AsyncAnthropic()
    message = await claude.messages.create(model=name, max_tokens=99, messages=question)
    print(message.content[0].text)
    try:
        await client.with_options(api_key="sk-other").models.list()
    except openai.AuthenticationError as error:
        print(type(error).__name__)

asyncio.run(main())
"""


class ListJournal:
    """A journal in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def append(self, records: Sequence[Record]) -> None:
        """See SessionJournal."""
        self.records += records

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """See SessionJournal."""
        return digest_of(name, data)


@asynccontextmanager
async def workspace_in(folder: Path, mode: str = "Overlay") -> AsyncIterator[Workspace]:
    """Create a workspace without network."""
    template = SandboxTemplate.model_validate({"workspaces": {"mode": mode}, "idleSeconds": 60})
    provider = LocalProvider(folder / "run", template, places=1)
    await provider.open()
    spec = WorkspaceSpec(group="task-1", working_dir="/workspace")
    yield await provider.acquire(spec, attempt="0-1", fence=Fence(1, "first"), name="agent")
    await provider.close()


def served(workspace: Workspace, model: Model, journal: ListJournal, **changes: Any) -> Any:
    """Serve the model to the programs of a workspace."""
    fixed: dict[str, Any] = {"session": "rollout-0-1", "task": "spelling", "member": 0, "seed": 1}
    fixed |= {"sampling": Sampling(), "limits": Limits(), **changes}
    return serve_model(workspace, model, journal, [], **fixed)


async def run(
    workspace: Workspace, program: str, model: WorkspaceModel, key: str, python: str = sys.executable
) -> CommandResult:
    """Run a Python program that can call the model."""
    command = [python, "-c", program]
    return await workspace.run(command, key=key, deadline_seconds=60, env=model.environment())


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_programs_record_matches_its_server_token_by_token(tmp_path: Path, mode: str) -> None:
    journal = ListJournal()
    async with VllmStandIn() as server:
        model = InferenceClient(f"{server.url}/v1", server.model, headers={}, key_origin="nowhere", call_seconds=60)
        await model.check()
        assert model.token_capture == "Tokens"
        checked = len(server.served)
        async with (
            workspace_in(tmp_path, mode) as workspace,
            served(workspace, model, journal, sampling=Sampling(max_tokens=40)) as access,
        ):
            result = await run(workspace, AGENT, access, "1:agent", python="python3")
        await model.close()
        requests = list(server.served)[checked:]
    assert result.ok, result.stderr.decode()
    responses = [record for record in journal.records if isinstance(record, ResponseRecord)]
    assert len(responses) == len(requests) == 4
    seen: list[int] = []
    for response, request in zip(responses, requests, strict=True):
        assert response.prompt_keep == len(seen)
        prompt = seen + list(response.prompt_token_ids or [])
        assert (prompt, response.completion_token_ids) == (list(request.prompt_ids), list(request.ids))
        assert response.logprobs == pytest.approx(list(request.logprobs))
        seen = [*prompt, *request.ids]


async def test_the_packages_of_openai_and_anthropic_work_in_a_workspace_as_they_are(tmp_path: Path) -> None:
    journal = ListJournal()
    async with workspace_in(tmp_path) as workspace, served(workspace, Speller(), journal) as model:
        result = await run(workspace, OPENAI, model, "1:agent")
    answer = "answer 1 of speller"
    assert result.stdout.decode().splitlines() == [str([answer] * 8), answer, answer, "AuthenticationError"], result
    responses = [record for record in journal.records if isinstance(record, ResponseRecord)]
    assert [bytes(response.completion_token_ids or []).decode() for response in responses] == [answer] * 10


async def test_a_program_that_is_killed_stops_the_generation_that_it_waited_for(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def before(_question: int, letter: int) -> None:
        if letter == 5:
            begun.set()
            await asyncio.sleep(60)

    speller = Speller(before=before)
    async with workspace_in(tmp_path) as workspace, served(workspace, speller, ListJournal()) as model:
        running = asyncio.create_task(run(workspace, AGENT, model, "1:agent"))
        await asyncio.wait_for(begun.wait(), 120)
        assert speller.cancelled == 0
        await workspace.kill_all(key="1:end")
        async with asyncio.timeout(120):
            while not speller.cancelled:  # noqa: ASYNC110 - nobody else could be told
                await asyncio.sleep(0.01)
        assert not (await running).ok


NONSENSE = """
import os, socket
port = int(os.environ["ANTHROPIC_BASE_URL"].rpartition(":")[2])
for request in (b"GET / HTTP/1.1\\r\\n\\r\\n", b"GET / HTTP/1.1\\r\\nHost: m\\r\\nA: " + b"x" * 20_000 + b"\\r\\n\\r\\n",
                b"GET / HTTP/1.1\\r\\nHost: m\\r\\nA: \\x01\\r\\n\\r\\n", b"X //[ HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n"):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        print(connection.makefile("rb").readline().decode().split()[1])
"""


async def test_a_program_that_sends_nonsense_is_refused_and_fills_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with workspace_in(tmp_path) as workspace, served(workspace, Speller(), ListJournal()) as model:
        result = await run(workspace, NONSENSE, model, "1:agent")
        assert result.ok, result.stderr.decode()
        assert {int(status) // 100 for status in result.stdout.split()} == {4}
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []

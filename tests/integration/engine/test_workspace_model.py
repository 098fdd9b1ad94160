"""An unmodified program in a workspace without network, its model, and a record that is complete whatever is killed."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.store import Store
from rollout_api.records import ResponseRecord

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
    """Three runners one after the other; the first two are killed when they ask for it. How the program ended."""
    for epoch in (1, 2, 3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVING_RUNNER), str(folder), mode, str(epoch),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode().strip()
        if epoch < 3:
            assert line == "kill me"
            process.send_signal(signal.SIGKILL)
        await process.wait()
    result: dict[str, object] = json.loads(line)
    return result


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_a_program_whose_runners_are_killed_sees_one_broken_answer_and_every_token_is_recorded(
    tmp_path: Path, mode: str
) -> None:
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

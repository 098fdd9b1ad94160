"""Programs that call their model at random, through three APIs, while their runner is killed: every sampled token is
trained once, as the server sampled it.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.full import first_seed
from tests.support.resumed import segments_in
from tests.support.talking_program import check_tokens
from tests.support.vllm_server import VllmStandIn

pytestmark = pytest.mark.full

PROGRAMS = 30
NAME = "random"
ROLLOUTCTL = ("-m", "rolloutctl.main", "run", "job.yaml", "-o", "json")

PROGRAM = r"""
import http.client, json, os, random, sys, threading, time, urllib.request

rng = random.Random(int(sys.argv[1]))
MODEL, OPENAI = os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"]
BEARER = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")

def post(url, body, headers, stream):
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body | {"model": MODEL, "stream": stream}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        if not stream:
            return json.load(reply)
        events = []
        for line in reply:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
            if any(end in line for end in ENDS):
                return events
    raise http.client.IncompleteRead(b"")

def chat(messages, stream):
    found = post(OPENAI + "/chat/completions", {"messages": messages}, BEARER, stream)
    if stream:
        return "".join(choice["delta"].get("content") or "" for event in found for choice in event["choices"])
    return found["choices"][0]["message"]["content"] or ""

def claude(messages, stream):
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    body = {"messages": messages, "max_tokens": 30}
    found = post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers, stream)
    if stream:
        return "".join(event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta")
    return "".join(block.get("text", "") for block in found["content"])

def responses(messages, stream):
    found = post(OPENAI + "/responses", {"input": messages, "store": False}, BEARER, stream)
    if stream:
        return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    texts = [part for item in found["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text", "") for part in texts)

def ask(api, messages, stream):
    while True:
        try:
            return api(messages, stream)
        except (http.client.HTTPException, OSError, ValueError):
            time.sleep(0.2)  # the runner was killed

conversations, apis = [], []
for number in range(int(sys.argv[2])):
    if not conversations or rng.random() < 0.2:
        conversations.append([{"role": "user", "content": f"Begin {number}."}])
        apis.append(rng.choice([chat, claude, responses]))
    if rng.random() < 0.1 and len(conversations[-1]) > 3:
        conversations[-1][1] = {"role": "assistant", "content": f"rewritten {number}"}
    picked = rng.sample(range(len(conversations)), min(len(conversations), rng.choice([1, 1, 2, 3])))
    streams, answers = {at: rng.random() < 0.5 for at in picked}, {}

    def one(at):
        answers[at] = ask(apis[at], list(conversations[at]), streams[at])

    threads = [threading.Thread(target=one, args=(at,)) for at in picked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in picked:
        answer = {"role": "assistant", "content": answers[at] or "nothing"}
        conversations[at] += [answer, {"role": "user", "content": f"And {number}?"}]
"""


def manifest(rng: random.Random, seed: int, url: str) -> dict[str, Any]:
    command = [sys.executable, "agent.py", str(seed), rng.choice(["4", "8", "14"])]
    files = [{"path": "agent.py", "content": PROGRAM}]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": NAME},
        "spec": {
            "mode": "Train",
            "groupSize": rng.choice([1, 2]),
            "tasks": {"inline": [{"name": "talk", "prompt": "Talk.", "files": files}]},
            "model": {"endpoint": {"baseURL": f"{url}/v1", "name": "policy", "callSeconds": 120}},
            "sampling": {"maxTokens": 20},
            "agent": {"type": "Command", "command": command, "maxTurns": 500},
            "sandbox": {"workspaces": {"mode": rng.choice(["Overlay", "Plain"])}},
            "output": {"uri": "./out"},
        },
    }


async def run_killed(folder: Path, environ: dict[str, str], rng: random.Random) -> Store:
    """Run the job to its end; its runner is killed up to three times."""
    (folder / "out").mkdir()
    store, kills = Store.open(str(folder / "out"), {}), rng.choice([0, 1, 3])
    while True:
        with (folder / "stderr.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *ROLLOUTCTL, cwd=folder, env=environ, stdout=asyncio.subprocess.DEVNULL, stderr=log
            )
        ended = asyncio.ensure_future(process.wait())
        if kills:
            enough = await asyncio.to_thread(segments_in, store) + rng.randrange(1, 12)
            while not ended.done() and await asyncio.to_thread(segments_in, store) < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.uniform(0, 0.3))
        if kills and not ended.done():
            process.kill()
            await ended
            kills -= 1
            continue
        assert await asyncio.wait_for(ended, 300) == 0, (folder / "stderr.log").read_text()[-3000:]
        return store


@pytest.mark.timeout(3600)
async def test_random_program_is_trained_on_exactly_its_servers_tokens(tmp_path: Path, environ: dict[str, str]) -> None:
    first = first_seed()
    for seed in range(first, first + PROGRAMS):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        async with VllmStandIn(
            tokens_per_second=rng.choice([None, 60, 200]),
            weight_versions=rng.random() < 0.5,
            scale_out=rng.random() < 0.8,
        ) as server:
            (folder / "job.yaml").write_text(yaml.safe_dump(manifest(rng, seed, server.url)))
            store = await run_killed(folder, environ, rng)
            run = await open_run(store, NAME)
            for index, result in enumerate(run.results()):
                end = result.outcome, result.stop_reason, result.attempt
                assert end == ("Completed", "Finished", 0), f"ROLLOUT_SEED={seed}: {result}"
                try:
                    check_tokens(server.served_in(f"rollout-{index}-0"), await run.tokens(index))
                except AssertionError as error:
                    raise AssertionError(f"ROLLOUT_SEED={seed}, rollout {index}") from error

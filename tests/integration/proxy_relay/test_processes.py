"""`rolloutctl proxy` and `rolloutctl proxy-worker` as a person starts them, with a vLLM that only the worker reaches."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.support.proxy_process import KEY, rolloutctl, said, url_of
from tests.support.vllm_server import VllmStandIn

BEARER = {"Authorization": f"Bearer {KEY}"}


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(process.wait(), 120)


async def test_model_behind_a_nat_answers_exactly_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    async with (
        VllmStandIn(model="tiny", tokens_per_second=20) as vllm,
        rolloutctl("proxy", "--relay", "--model", "tiny", "--port", "0", "--store", str(tmp_path)) as proxy,
        aiohttp.ClientSession() as client,
    ):
        url = await url_of(proxy)
        worker = ("proxy-worker", "--url", url, "--model", "tiny", "--endpoint", f"{vllm.url}/v1")
        async with rolloutctl(*worker) as first, rolloutctl(*worker) as second:
            await asyncio.gather(said(first, "connected as worker"), said(second, "connected as worker"))
            async with client.post(f"{url}/sessions/s", headers=BEARER) as reply:
                base_url = url + (await reply.json())["base_path"]
            served = len(vllm.served)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
            calls = [asyncio.ensure_future(client.post(f"{base_url}/chat/completions", json=body)) for _ in range(8)]
            while len(vllm.served) < served + 8:  # noqa: ASYNC110 counted by a server that has no event for it
                await asyncio.sleep(0.01)
            first.kill()
            replies = await asyncio.gather(*calls)
            assert [reply.status for reply in replies] == [200] * 8
            async with client.get(f"{url}/sessions/s", headers=BEARER) as reply:
                turns = (await reply.json())["turns"]
            really = [(request.prompt_ids, request.ids) for request in vllm.served if request.finish != "abort"]
            for turn in turns:
                assert (turn["prompt_token_ids"], turn["completion_token_ids"]) in really
            assert len(turns) == 8
            # Without ignore_eos, the model may end its answer sooner: the seed depends on which calls were repeated.
            goes_on = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
            goes_on["return_token_ids"] = True
            async with client.post(f"{base_url}/completions", json=goes_on) as reply:
                [choice] = (await reply.json())["choices"]
            # The stand-in's chat template puts a head before messages, and none before a prompt.
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (
                vllm.served[-1].prompt_ids,
                vllm.served[-1].ids,
            )
            assert len(choice["token_ids"]) == 5
            assert await stopped(second) == 0
        assert await stopped(proxy) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["proxy", "--model", "m"], "--endpoint URL, or --relay"),
        (["proxy", "--model", "m", "--relay", "--endpoint", "http://x/v1"], "--endpoint URL, or --relay"),
        (["proxy", "--model", "m", "--endpoint", "x"], "--endpoint: "),
        (["proxy", "--model", "m", "--relay", "--admin-key-file", "/nowhere/key"], "/nowhere/key"),
    ],
)
async def test_a_wrong_command_line_is_refused_with_a_message(arguments: list[str], words: str) -> None:
    async with rolloutctl(*arguments) as process:
        _, told = await process.communicate()
        assert process.returncode == 2
        assert words in told.decode()

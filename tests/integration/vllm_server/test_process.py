"""The stand-in as a separate process, started like vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.ports import free_port
from tests.support.vllm_server import made_by

REPOSITORY = Path(__file__).parents[3]
FLAGS = [
    *("serve", "org/policy-7b", "--served-model-name", "policy", "--host", "127.0.0.1", "--port", "0"),
    *("--tensor-parallel-size", "2", "--enable-prefix-caching", "--max-model-len", "4096"),
    *("--weight-transfer-config", '{"backend":"nccl"}', "--print-url"),
]


@asynccontextmanager
async def process(*flags: str, standin_args: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start a stand-in; yields its URL."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "STANDIN_ARGS": standin_args}
    command = (sys.executable, "-m", "tests.support.vllm_server", *flags)
    started = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert started.stdout is not None
    try:
        yield started, (await started.stdout.readline()).decode().strip()
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_stand_in_accepts_and_reports_vllms_command_line(tmp_path: Path) -> None:
    async with process(*FLAGS, standin_args='--base-version 3 --fault claim_version="\\"7\\""') as (started, url):
        async with aiohttp.ClientSession(url) as client:

            async def ask(method: str, path: str, body: Any = None) -> Any:
                async with client.request(method, path, json=body) as response:
                    return await response.json()

            assert await ask("GET", "/_standin/flags") == FLAGS
            (card,) = (await ask("GET", "/v1/models"))["data"]
            assert (card["id"], card["max_model_len"]) == ("policy", 4096)
            assert await ask("GET", "/weight_info") == {"weight_version": "7"}
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "ignore_eos": True}}
            answer = await ask("POST", "/inference/v1/generate", body)
            assert answer["choices"][0]["token_ids"] == made_by(3, [1, 2], 9, ignore_eos=True)
            (record,) = await ask("GET", "/_standin/served")
            assert record["spans"] == [[3, 0, 9]]
            tools = {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"type": "function", "function": {"name": "x"}}],
            }
            assert "--tool-call-parser" in (await ask("POST", "/v1/chat/completions", tools))["error"]["message"]
            await ask("POST", "/_standin/restart", {})
            async with asyncio.timeout(120):
                while True:
                    try:
                        if (await ask("GET", "/_standin/state"))["boots"] == 2:
                            break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await started.wait() == 0


async def test_a_kill_breaks_a_stream_off() -> None:
    async with process("--port", "0", "--print-url", "--tokens-per-second", "100") as (started, url):
        got: list[bytes] = []

        async def read() -> None:
            body = {"token_ids": [1], "stream": True, "sampling_params": {"ignore_eos": True}}
            async with (
                aiohttp.ClientSession(url) as client,
                client.post("/inference/v1/generate", json=body) as response,
            ):
                async for line in response.content:
                    got.append(line)
                    if len(got) == 5:
                        started.kill()

        with pytest.raises(aiohttp.ClientError):
            await read()
        assert got


async def test_server_of_two_nodes_answers_when_both_run_and_ends_with_either() -> None:
    shared = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))

    async def start(*flags: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "tests.support.vllm_server", *shared, *flags)
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    first = await start("--node-rank", "0", "--port", "0", "--print-url")
    assert first.stdout is not None
    url = asyncio.create_task(first.stdout.readline())
    done, _ = await asyncio.wait([url], timeout=1)
    second = await start("--node-rank", "1", "--headless")
    try:
        assert (await url).startswith(b"http://")
        assert not done, "it served without its other node"
        second.kill()
        assert await first.wait() == 1
    finally:
        for process in (first, second):
            if process.returncode is None:
                process.kill()
            await process.wait()

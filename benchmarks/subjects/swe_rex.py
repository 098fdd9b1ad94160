"""SWE-ReX: its own server on loopback, called by its own client. Runs in its own virtual environment."""

import asyncio
import secrets
import sys
import time
from asyncio.subprocess import DEVNULL
from typing import Any

from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest  # type: ignore[import-not-found]
from swerex.runtime.remote import RemoteRuntime  # type: ignore[import-not-found]

from benchmarks.conversation import answer_questions
from tests.support.ports import free_port


async def main() -> None:
    """Answer questions {call: execute | session, times} with {seconds: [one value for each call]}."""
    port, token = free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    server = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    try:
        runtime = RemoteRuntime(host="http://127.0.0.1", port=port, auth_token=token, timeout=5)
        await runtime.wait_until_alive(timeout=30)
        await runtime.create_session(CreateBashSessionRequest())

        async def measure(question: dict[str, Any]) -> dict[str, Any]:
            seconds = []
            for _ in range(question["times"]):
                started = time.perf_counter()
                if question["call"] == "execute":
                    answer = await runtime.execute(Command(command=["true"]))
                else:
                    answer = await runtime.run_in_session(BashAction(command="true"))
                seconds.append(time.perf_counter() - started)
                if answer.exit_code != 0:
                    raise RuntimeError(f"true ended with code {answer.exit_code}")
            return {"seconds": seconds}

        await answer_questions(measure)
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main())

"""A process that measures something on request. A request is one line of JSON, and so is its answer.

Everything that is measured runs in its own process, and a peer in its own interpreter, so that libraries, memory and event
loops are separate. One benchmark can send requests to several processes in turn. Only the standard library is used.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 10.0  # time limit for a process to close servers and workspaces
SHOWN_CHARACTERS = 3000  # of a process's stderr in a message

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class SubjectFailed(Exception):
    """The process ended without an answer; the message ends with the end of its stderr."""


class Process:
    """A program that answers requests line by line. A context manager that ends the program on exit."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 closed in __exit__
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Return its answer to one request. Raises SubjectFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace")[-SHOWN_CHARACTERS:]
            raise SubjectFailed(f"{self._name} ended with code {code} when asked {question}: {words}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Subject(Process):
    """A module run by an interpreter of this machine."""

    def __init__(self, module: str, python: Path = Path(sys.executable)) -> None:
        super().__init__(module, [str(python), "-m", module])


async def answer_questions(handle: Handler) -> None:
    """Answer every line of standard input until it ends. Other output of the process goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answers.write(json.dumps(await handle(json.loads(line))) + "\n")
        answers.flush()

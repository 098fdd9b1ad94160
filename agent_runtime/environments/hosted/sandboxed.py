"""One episode in a workspace: a process has the episode, and a command for each step asks that process. The executor
remembers the result of the command, so the next runner gets it. The process outlives the runner. If it has ended, the
command starts another one and repeats all actions.

Run as `python3 environment.zip` with one JSON object as input: {"start": {...}, "actions": [all so far]}, and "try":
true to test the environment with one step in a separate episode first. It prints the answer of `hosted.worker`, with
the moves of the actions that the process had not taken yet, or again that of the last action.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from agent_runtime.environments.hosted.episode import Episode
from agent_runtime.environments.hosted.game import GameError

SOCKET = "environment.socket"  # in the folder of the program: paths of sockets must be short
CONNECT_SECONDS = 30.0  # importing an environment's packages may take long on a cold disk
PAUSE_SECONDS = 0.02
MOVES_CHARACTERS = (
    300_000  # limit of the moves in an answer, which must fit into one output; the last is always reported
)


class Kept:
    """The episode, its actions and their moves."""

    def __init__(self) -> None:
        self._start: dict[str, Any] | None = None
        self._actions: list[str | None] = []
        self._moves: list[dict[str, Any]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request.get("try"):
                trial = Episode(request["start"])
                if trial.start()["observation"] is not None:
                    trial.try_step()
            return self._answer(request["start"], request["actions"])
        except GameError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - an environment is user code
            return {"error": f"the environment raised {type(error).__name__}: {error}"}

    def _answer(self, start: dict[str, Any], actions: list[str | None]) -> dict[str, Any]:
        known = len(self._actions)
        if start != self._start or actions[:known] != self._actions:
            self._episode, self._start, self._actions, self._moves = Episode(start), start, [], []
            self._beginning = self._episode.start()
            known = 0
        for action in actions[known:]:
            self._moves += self._episode.steps([action])
            self._actions.append(action)
        taken = self._moves[min(known, len(actions) - 1) :] if actions else []
        return {"start": self._beginning, "moves": latest(taken)}


def latest(moves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    observation_text: list[dict[str, Any]] = []
    characters = 0
    for move in reversed(moves):
        characters += len(json.dumps(move))
        if observation_text and characters > MOVES_CHARACTERS:
            break
        observation_text.append(move)
    return observation_text[::-1]


def serve() -> None:
    """Answer one connection after another, forever: the process ends with the workspace."""
    listening = socket.socket(socket.AF_UNIX)
    if os.path.exists(SOCKET):
        os.remove(SOCKET)
    listening.bind(SOCKET)
    listening.listen()
    kept = Kept()
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb") as lines:
            line = lines.readline()
            if line:
                lines.write(json.dumps(kept.answer(json.loads(line))).encode() + b"\n")


def ask(request: bytes) -> bytes:
    """Return the answer of the process with the episode, which is started if it does not run."""
    started = False
    # Counted in pauses between the tries, because no clock stops while the sandbox has paused the programs.
    tries = round(CONNECT_SECONDS / PAUSE_SECONDS)
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(SOCKET)
                with connection.makefile("rwb") as lines:
                    lines.write(request + b"\n")
                    lines.flush()
                    answer = lines.readline()
            if answer:
                return answer
            return b'{"error": "the process of the environment ended while it answered"}\n'
        except (FileNotFoundError, ConnectionRefusedError):
            tries -= 1
            if tries < 0:
                return b'{"error": "the process of the environment did not start"}\n'
        if not started:
            subprocess.Popen(
                [sys.executable, os.path.abspath(sys.argv[0]), "serve"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            started = True
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    """Serve the environment with the argument `serve`; without it, send the request on standard input to that server and
    write its answer. Both run in the folder of this program. Modules of the folder that contains it can be imported.
    """
    program = os.path.abspath(sys.argv[0])
    os.chdir(os.path.dirname(program))
    sys.path.insert(1, os.path.dirname(os.getcwd()))
    sys.argv[0] = program
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.stdout.buffer.write(ask(json.dumps(json.load(sys.stdin)).encode()))

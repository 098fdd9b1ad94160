"""Episodes over standard input and output, with one JSON line per request and answer: `python -m
agent_runtime.environments.hosted.worker`.

{"episode": 7, "start": {id, seed, maxSteps, formatPenalty, config}, "actions": [...]}   → {"start": ..., "moves": [...]}
    {"episode": 7, "start": ..., "actions": [], "try": true}   → the same, after a step that shows whether it works
    {"episode": 7, "actions": ["Right"]}                                                     → {"moves": [...]}
    {"episode": 7}                                                                           forget it; no answer

Errors are answered with `{"error": message}`. Answers come in the order of the requests.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterable
from typing import Any, BinaryIO

from agent_runtime.environments.hosted.episode import Episode
from agent_runtime.environments.hosted.game import GameError


def serve(requests: Iterable[bytes], answers: BinaryIO) -> None:
    episodes: dict[int, Episode] = {}
    for line in requests:
        request = json.loads(line)
        number = request["episode"]
        if "actions" not in request:
            episodes.pop(number, None)
            continue
        answers.write(json.dumps(answer(episodes, number, request)).encode() + b"\n")
        answers.flush()


def answer(episodes: dict[int, Episode], number: int, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = {}
        if "start" in request:
            episodes[number] = Episode(request["start"])
            reply["start"] = episodes[number].start()
        if request.get("try") and reply["start"]["observation"] is not None:
            episodes[number].try_step()
        reply["moves"] = episodes[number].steps(request["actions"])
        return reply
    except GameError as error:
        episodes.pop(number, None)
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - an environment is user code
        episodes.pop(number, None)
        try:
            message = str(error)
        except Exception:  # noqa: BLE001 - also user code
            message = "its message cannot be shown"
        return {"error": f"the environment raised {type(error).__name__}: {message}"}


def main() -> None:
    """Reserve standard output for answers: output of environments is discarded. Ends with the requests, even if an
    episode hangs.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            waiting.put(line)
        # The engine has ended or closed the connection, so no reader waits for an answer.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    serve(iter(waiting.get, b""), answers)


if __name__ == "__main__":
    main()

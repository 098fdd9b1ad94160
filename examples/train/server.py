"""The policy behind the part of vLLM's HTTP API that rollouts and policy updates use: `python -m
examples.train.server`.

It takes and returns token ids, with log probabilities and the version of the weights that made them; it can be paused, load
and verify weights, and be resumed. It accepts the applicable options of vLLM, so that a ModelServer can start it instead.
"""

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from aiohttp import web

from examples.train import policy
from examples.train.policy import END, TOKENS

CONTEXT_LENGTH = 16_384
"""Limit of the tokens of prompt and answer together; 20 turns have about 700."""
BODY_BYTES = 16 << 20
UNLABELLED = "default"
"""Version of weights that nobody has set a version for, as in vLLM."""

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.Response]]


class Refused(Exception):
    """The request is not supported, or invalid."""


class Engine:
    """The weights, their version, and whether requests are answered or paused."""

    def __init__(self, folder: Path | None) -> None:
        self._first = policy.fresh_weights() if folder is None else policy.load(folder)
        self.weights = self._first
        self.version = UNLABELLED
        self.sampled = 0
        """Number of sampled tokens."""
        self.running = asyncio.Event()
        self.running.set()

    async def answer(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Json:
        """Return a choice with sampled tokens. All come from one version, because sampling is never interrupted."""
        if sampling.get("temperature") not in (None, 1) or sampling.get("stop"):
            raise Refused("only temperature 1 without stop strings is supported; leave out temperature and stop")
        if not prompt or len(prompt) >= CONTEXT_LENGTH:
            raise Refused(
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {CONTEXT_LENGTH}"
            )
        await self.running.wait()
        most = CONTEXT_LENGTH - len(prompt)
        wanted, seed = sampling.get("max_tokens"), sampling.get("seed")
        ids, logprobs = policy.sample(
            self.weights,
            prompt,
            most if wanted is None else min(wanted, most),
            secrets.randbits(31) if seed is None else seed,
        )
        self.sampled += len(ids)
        return {
            "index": 0,
            "token_ids": ids,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token, logprob in zip(ids, logprobs, strict=True)
                ]
            },
            "finish_reason": "stop" if ids[-1] == END else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }

    def reload(self, folder: Path | None) -> None:
        """Load weights from a folder; None loads the first ones again. Raises OSError, ValueError."""
        self.weights = self._first if folder is None else policy.load(folder)

    def checksums(self) -> dict[str, str]:
        return {"table": policy.checksum(self.weights)}


def render(messages: Sequence[Mapping[str, Any]], *, to_be_answered: bool = True) -> list[int]:
    """Return the tokens of the chat template: role, content and end of each message, then the role of the next speaker."""
    ids = [token for message in messages for token in _message_tokens(message["role"], message.get("content") or "")]
    return [*ids, TOKENS["<|assistant|>"]] if to_be_answered else ids


@lru_cache(maxsize=10_000)
def _message_tokens(role: str, text: str) -> tuple[int, ...]:
    speaker = TOKENS.get(f"<|{role}|>")
    if speaker is None:
        raise Refused(f"role {role!r} is not supported by the chat template")
    return speaker, *policy.encode(text), END


class Routes:
    """The handlers of the HTTP routes; bodies and answers are like those of vLLM 0.30 (docs/token-exact.md,
    docs/policy-updates.md).
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES)
        posts: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/chat/completions/render": self._render,
            "/v1/chat/completions/derender": self._derender,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._call,
            "/update_weight_version": self._name_weights,
            "/weight_checker": self._check_weights,
        }
        for path, answer in posts.items():
            app.router.add_post(path, _body_handler(answer))
        app.router.add_post("/inference/v1/generate", self._generate)
        gets: dict[str, Callable[[], Json]] = {
            "/health": dict,
            "/version": lambda: {"version": "0.30.0"},
            "/v1/models": self._models,
            "/is_paused": lambda: {"is_paused": not self._engine.running.is_set()},
            "/weight_info": lambda: {"weight_version": self._engine.version},
        }
        for path, say in gets.items():
            app.router.add_get(path, _json_handler(say))
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        """Return the metrics that runners read."""
        return web.Response(text=f"vllm:generation_tokens_total {self._engine.sampled}\n")

    def _models(self) -> Json:
        model = {"id": self._name, "object": "model", "owned_by": "examples", "max_model_len": CONTEXT_LENGTH}
        return {"object": "list", "data": [model]}

    async def _chat(self, body: Json) -> Json:
        prompt = render(body["messages"])
        most = body.get("max_tokens") or body.get("max_completion_tokens")
        choice = await self._engine.answer(prompt, {**body, "max_tokens": most})
        return {**self._head(choice, len(prompt)), "prompt_token_ids": prompt}

    async def _render(self, body: Json) -> Json:
        most = body.get("max_tokens") or body.get("max_completion_tokens")
        sampling = {name: body[name] for name in ("temperature", "seed", "stop") if body.get(name) is not None}
        return {
            "token_ids": render(body["messages"], to_be_answered=body.get("add_generation_prompt", True)),
            "sampling_params": {**sampling, "max_tokens": most, "logprobs": 0},
            "model": self._name,
        }

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            choice = await self._engine.answer(body["token_ids"], body["sampling_params"])
        except Refused as error:
            return _refusal(error)
        prompt, made = len(body["token_ids"]), len(choice["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if not body.get("stream"):
            return web.json_response({"choices": [choice], "usage": usage})
        events = (json.dumps({"choices": [choice]}), json.dumps({"choices": [], "usage": usage}), "[DONE]")
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    async def _derender(self, body: Json) -> Json:
        [choice] = body["generate_response"]["choices"]
        return self._head(choice, body["prompt_tokens"])

    def _head(self, choice: Json, prompt: int) -> Json:
        ids = choice["token_ids"]
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        message = {"role": "assistant", "content": policy.decode(ids)}
        return {"model": self._name, "choices": [{**choice, "message": message}], "usage": usage}

    async def _tokenize(self, body: Json) -> Json:
        ids = policy.encode(body["prompt"])
        return {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT_LENGTH}

    async def _detokenize(self, body: Json) -> Json:
        return {"prompt": policy.decode(body["tokens"], special=True)}

    async def _pause(self, body: Json) -> Json:
        self._engine.running.clear()
        return {"status": "paused"}

    async def _resume(self, body: Json) -> Json:
        self._engine.running.set()
        return {"status": "resumed"}

    async def _call(self, body: Json) -> Json:
        if body.get("method") != "reload_weights":
            raise Refused(f"method {body.get('method')!r} is not supported; expected reload_weights")
        path = (body.get("kwargs") or {}).get("weights_path")
        try:
            self._engine.reload(None if path is None else Path(path))
        except (OSError, ValueError) as error:
            raise Refused(f"no weights could be loaded from {path}: {error}") from error
        return {"results": [None]}

    async def _name_weights(self, body: Json) -> Json:
        self._engine.version = str(body["new_version"])
        return {"success": True, "new_version": self._engine.version}

    async def _check_weights(self, body: Json) -> Json:
        return {"checksums": self._engine.checksums()}


def _json_handler(say: Callable[[], Json]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(say())

    return handle


def _body_handler(answer: Callable[[Json], Awaitable[Json]]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        try:
            return web.json_response(await answer(await request.json() if request.can_read_body else {}))
        except Refused as error:
            return _refusal(error)

    return handle


def _refusal(error: Refused) -> web.Response:
    said = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": said}, status=400)


async def serve(engine: Engine, name: str, host: str, port: int) -> web.AppRunner:
    """Start the server. Its port is in `addresses` of the result, and `cleanup` stops it."""
    runner = web.AppRunner(Routes(engine, name).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=4096).start()
    return runner


async def _run(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    folder = None if options.model is None else Path(options.model)
    runner = await serve(Engine(folder), options.served_model_name, options.host, options.port)
    print(f"http://{options.host}:{runner.addresses[0][1]}", flush=True)
    await stopped.wait()
    await runner.cleanup()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train.server", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "model", nargs="?", help="folder with the first weights; default: a policy that has learned nothing"
    )
    parser.add_argument("--served-model-name", default="lake")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_run(parser.parse_known_args(arguments)[0]))


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m tests.support.vllm_server [serve MODEL] [--port 0] [--print-url] ...`: the stand-in as a process.

It accepts vLLM's own command line too. Flags of vLLM that mean something here are followed, the others ignored; GET
/_standin/flags returns all of them. In a pod, STANDIN_ARGS in the environment adds arguments that vLLM does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from tests.support.vllm_server.faults import Faults
from tests.support.vllm_server.model import answers_from_json
from tests.support.vllm_server.server import VllmStandIn
from tests.support.vllm_server.several_nodes import MASTER_PORT, follow, gather


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    given = sys.argv[1:]
    arguments = parse([*given, *shlex.split(os.environ.get("STANDIN_ARGS", ""))])
    asyncio.run(serve(arguments, given))


def parse(given: list[str]) -> argparse.Namespace:
    """Return the arguments, without flags of vLLM that mean nothing here."""
    parser = argparse.ArgumentParser(prog="vllm_server", description=__doc__, allow_abbrev=False)
    as_vllm = parser.add_argument_group("as vLLM has them")
    as_vllm.add_argument("--model", default="policy")
    as_vllm.add_argument("--served-model-name", nargs="+")
    as_vllm.add_argument("--host", default="127.0.0.1")
    as_vllm.add_argument("--port", type=int, default=8000)
    as_vllm.add_argument("--api-key")
    as_vllm.add_argument("--max-model-len", type=int, default=32768)
    as_vllm.add_argument("--max-num-seqs", type=int, default=256)
    as_vllm.add_argument("--scheduling-policy", default="fcfs", choices=("fcfs", "priority"))
    as_vllm.add_argument("--enable-auto-tool-choice", action="store_true")
    as_vllm.add_argument("--tool-call-parser")
    as_vllm.add_argument("--reasoning-parser")
    as_vllm.add_argument("--nnodes", type=int, default=1)
    as_vllm.add_argument("--master-addr", default="127.0.0.1")
    as_vllm.add_argument("--master-port", type=int, default=MASTER_PORT)
    as_vllm.add_argument("--headless", action="store_true")
    as_vllm.add_argument("--enable-return-routed-experts", action="store_true")
    own = parser.add_argument_group("its own")
    own.add_argument("--print-url", action="store_true", help="one line on standard output as soon as it serves")
    own.add_argument("--script", type=Path, help="JSON: {session or *: [answer, ...]}")
    own.add_argument("--tokens-per-second", type=float, help="of each request; as fast as it can when not given")
    own.add_argument("--load-seconds", type=float, default=0.0)
    own.add_argument("--abort-seconds", type=float, default=0.0)
    own.add_argument("--base-version", type=int, default=0)
    own.add_argument("--transfer-port", type=int, default=0, help="where a trainer's tensors come in")
    own.add_argument("--kv-blocks", type=int, default=65536)
    own.add_argument("--keep-served", type=int, default=20_000, help="requests in the record")
    own.add_argument("--no-scale-out", action="store_true", help="render, derender and generate are disabled")
    own.add_argument("--no-weight-checker", action="store_true", help="no /weight_checker, as in any release so far")
    own.add_argument(
        "--weight-versions", action="store_true", help="generate says which weights made what, as since 0.30"
    )
    own.add_argument("--keeps-streamed-ids", action="store_true", help="streamed chat with tools loses no ids")
    own.add_argument("--fault", action="append", default=[], metavar="NAME=JSON")
    if given[:1] == ["serve"]:
        # As in a pod, where a probe comes from the node.
        parser.set_defaults(host="0.0.0.0")
        given = given[1:]
        if given and not given[0].startswith("-"):
            given = ["--model", *given]
    arguments, _ = parser.parse_known_args(given)
    return arguments


async def serve(arguments: argparse.Namespace, flags: list[str]) -> None:
    """Serve until a signal."""
    faults = Faults()
    for fault in arguments.fault:
        name, _, value = fault.partition("=")
        faults.update({name: json.loads(value or "true")})
    name = arguments.served_model_name[0] if arguments.served_model_name else arguments.model
    server = VllmStandIn(
        model=name,
        max_model_len=arguments.max_model_len,
        api_key=arguments.api_key or os.environ.get("VLLM_API_KEY"),
        script=answers_from_json(json.loads(arguments.script.read_bytes())) if arguments.script else None,
        tokens_per_second=arguments.tokens_per_second,
        load_seconds=arguments.load_seconds,
        abort_seconds=arguments.abort_seconds,
        base_version=arguments.base_version,
        scale_out=not arguments.no_scale_out,
        weight_checker=not arguments.no_weight_checker,
        weight_versions=arguments.weight_versions,
        routed_experts=arguments.enable_return_routed_experts,
        tool_parser=arguments.enable_auto_tool_choice and bool(arguments.tool_call_parser),
        reasoning_parser=arguments.reasoning_parser,
        drops_streamed_ids=not arguments.keeps_streamed_ids,
        priority_scheduling=arguments.scheduling_policy == "priority",
        max_num_seqs=arguments.max_num_seqs,
        kv_blocks=arguments.kv_blocks,
        keep_served=arguments.keep_served,
        faults=faults,
        flags=flags,
        host=arguments.host,
        port=arguments.port,
        transfer_port=arguments.transfer_port,
    )
    serving = asyncio.current_task()
    assert serving is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        if arguments.headless:
            await follow(arguments.master_addr, arguments.master_port)
            sys.exit("the first node has ended")
        lost = await gather(arguments.nnodes, arguments.master_port) if arguments.nnodes > 1 else asyncio.Event()
        async with server:
            if arguments.print_url:
                print(server.url, flush=True)
            await lost.wait()
            sys.exit("another node has ended")


if __name__ == "__main__":
    main()

"""`python -m tests.support.sglang_server --model-path M --port 8000 ...`: the stand-in as a process.

Takes SGLang's own command line; flags that mean nothing here are ignored. STANDIN_ARGS in the environment adds arguments
that SGLang does not have.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys

from tests.support.sglang_server.server import SglangStandIn


async def _serve(arguments: argparse.Namespace) -> None:
    server = SglangStandIn(
        model=arguments.served_model_name or arguments.model_path,
        max_model_len=arguments.context_length,
        max_num_seqs=arguments.max_running_requests,
        tokens_per_second=arguments.tokens_per_second,
        incremental=arguments.incremental_streaming_output,
        tool_parser=bool(arguments.tool_call_parser),
        routed_experts=arguments.enable_return_routed_experts,
        flags=sys.argv[1:],
        host=arguments.host,
        port=arguments.port,
    )
    serving = asyncio.current_task()
    assert serving is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with server:
            await asyncio.Event().wait()


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="sglang_server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model-path", default="policy")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--tokens-per-second", type=float, help="of each request; as fast as it can when not given")
    given = [*sys.argv[1:], *shlex.split(os.environ.get("STANDIN_ARGS", ""))]
    arguments, _ = parser.parse_known_args(given)
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    main()

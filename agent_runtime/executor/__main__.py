"""`python -m agent_runtime.executor`, and `executor`, the portable bundle's launcher. USAGE describes the arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from agent_runtime.executor.kernel import name_process
from agent_runtime.executor.overlay import HostFailure, start_zygote

USAGE_ERROR = 2
MODE_IMPOSSIBLE = 3
# The launcher passes its environment after this option: commands get it, the interpreter and the loader must not.
ENVIRONMENT = "--environment"
USAGE = (
    "usage: executor --config FILE (- for standard input) | --config-json JSON | --copy-to FOLDER (of the bundle)\n"
    f"       then, at most: {ENVIRONMENT} NAME=VALUE ... (the environment of every command)"
)


def main(arguments: Sequence[str]) -> int:
    """Run the executor; return the exit status."""
    split = arguments.index(ENVIRONMENT) if ENVIRONMENT in arguments else len(arguments)
    own, variables = arguments[:split], arguments[split + 1 :]
    if len(own) != 2 or own[0] not in ("--config", "--config-json", "--copy-to"):
        print(USAGE, file=sys.stderr)
        return USAGE_ERROR
    option, value = own
    return _copy_to(value) if option == "--copy-to" else _serve(option, value, variables)


def _copy_to(folder: str) -> int:
    """Copy the bundle, in an init container, for clusters that cannot mount its image."""
    import shutil  # imported here because a zygote's imports are inherited by every workspace

    if not os.path.exists(os.path.join(sys.prefix, "lib/loader")):
        print("--copy-to: this is not the portable bundle; call its launcher, `executor`", file=sys.stderr)
        return USAGE_ERROR
    try:
        shutil.copytree(sys.prefix, os.path.join(folder, "python"), dirs_exist_ok=True)
        shutil.copy(os.path.join(os.path.dirname(sys.prefix), "executor"), folder)
    except OSError as error:  # includes shutil.Error
        print(f"--copy-to {folder}: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _serve(option: str, value: str, variables: Sequence[str]) -> int:
    if option == "--config-json":
        name_process("executor")
    # Before any input is read, so that the process from which workspaces are forked has no token, request or secret in
    # its memory.
    start_zygote()

    import asyncio

    from agent_runtime.executor.config import image_environment, read_config
    from agent_runtime.executor.daemon import hold_stop_signals, serve

    hold_stop_signals()
    try:
        if option == "--config-json":
            text = value
        elif value == "-":
            text = sys.stdin.read()
        else:
            with open(value, encoding="utf-8") as file:
                text = file.read()
        config = read_config(text, image_environment(variables))
    except (OSError, ValueError) as error:
        print(f"{option if option == '--config-json' else value}: {error}", file=sys.stderr)
        return USAGE_ERROR
    try:
        return asyncio.run(serve(config))
    except HostFailure as failure:
        print(failure, file=sys.stderr)
        return MODE_IMPOSSIBLE
    except OSError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

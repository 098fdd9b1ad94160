"""`rolloutctl`: the command line. Each command has a module. This one imports them on demand and prints errors."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rolloutctl.errors import EXIT_CODES, CommandError, Exit
from rolloutctl.ui.console import only_answers_on_stdout, say

DEBUG = "debug"


class LogLevel(StrEnum):
    """Lowest level of shown log messages of the engine and its libraries."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


# In the order of the help.
COMMANDS = [
    "init",
    "explain",
    "validate",
    "check",
    "images",
    "run",
    "submit",
    "ls",
    "results",
    "diff",
    "watch",
    "show",
    "logs",
    "view",
    "report",
    "export",
    "convert",
    "dataset",
    "plugins",
    "gc",
    "layers",
    "proxy",
    "proxy-worker",
    "serve",
    "doctor",
    "sandbox",
    "stream",
]
# Commands that are not in a module of their name.
ELSEWHERE = {"validate": "check", "logs": "watch", "proxy-worker": "proxy"}


class Commands(TyperGroup):
    """The command group. It prints exceptions as messages, and tracebacks only on request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Placeholders, from which typer suggests names for a mistyped command.
        self.commands = {name: TyperCommand(name) for name in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: Any, name: str) -> Any:
        return _command(name) if name in COMMANDS else None

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except SystemExit as end:
            _end_process(end.code)

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except Exception as error:  # options before the command
            _without_pydantics_prefix(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError):
            say("Interrupted.")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of a pipe, such as head or less, has ended.
            raise typer.Exit(Exit.OK) from None
        except Exception as error:
            from rolloutctl.known_errors import as_command_error

            known = as_command_error(error)
            if known is None and type(error).__module__.startswith(("click", "typer")):
                _without_pydantics_prefix(error)
                raise  # usage errors and exits, which typer reports itself
            _print_error(error, known, debug=bool(ctx.params.get(DEBUG)))
            raise typer.Exit(known.code if known else Exit.BUG) from None


def _without_pydantics_prefix(error: Exception) -> None:
    if isinstance(text := getattr(error, "message", None), str):
        error.message = text.replace("Value error, ", "")  # type: ignore[attr-defined]


def _end_process(code: object) -> NoReturn:
    """End the process without finalising the interpreter.

    Finalising waits for threads that user code has started, and for those of obstore (recording/obstore_threads.py).
    Everything that must be closed is closed before.
    """
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of a pipe, such as head or less, has ended
            output.flush()
    os._exit(code if isinstance(code, int) else Exit.OK if code is None else Exit.FAILED)


def _print_error(error: Exception, known: CommandError | None, *, debug: bool) -> None:
    if debug:
        say("".join(traceback.format_exception(error)))
    if known is None:
        say(f"This is a bug in rolloutctl: {type(error).__name__}: {error}", "bold red")
        if not debug:
            say("`rolloutctl --debug …` shows the traceback; please report it.")
        return
    say(f"Error: {known.message}" if "\n" not in known.message else known.message, "red")
    if known.hint:
        say(known.hint)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode=None,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"rolloutctl {version('agent-rollouts')}")
        raise typer.Exit


@app.callback(help="Agentic rollouts: run a job and show its results.")
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", case_sensitive=False, help="Level of log messages on standard error.")
    ] = LogLevel.WARNING,
) -> None:
    logging.basicConfig(level=log_level.value, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _command(name: str) -> Any:
    """Import a command when it is used, because importing all of them takes as long as a short command."""
    module = importlib.import_module(f"rolloutctl.commands.{ELSEWHERE.get(name, name)}")
    alone = typer.Typer(rich_markup_mode=None)
    if hasattr(module, "app"):
        alone.add_typer(module.app, name=name, epilog=EXIT_CODES)
    else:
        alone.command(name, epilog=EXIT_CODES)(getattr(module, name.replace("-", "_")))
    command = typer.main.get_group(alone).commands[name]
    for leaf in command.commands.values() if isinstance(command, TyperGroup) else [command]:
        assert leaf.callback is not None  # a command always has one
        leaf.callback = _runnable(leaf.callback)
    return command


def _runnable(command: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a command: run coroutines, and keep standard output for the answer."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with only_answers_on_stdout():
            if inspect.iscoroutine(result := command(**options)):
                asyncio.run(result)

    return run


if __name__ == "__main__":
    app()

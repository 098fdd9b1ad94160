"""`rolloutctl`: the command line. Each command has a module; this one combines them and converts errors into messages."""

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


# In the order in which they are used.
COMMANDS = [
    "init",
    "validate",
    "check",
    "images",
    "run",
    "submit",
    "results",
    "show",
    "report",
    "export",
    "convert",
    "dataset",
    "plugins",
    "gc",
    "proxy",
    "proxy-worker",
    "serve",
    "doctor",
    "sandbox",
    "stream",
]
# Commands that are not in a module of their name.
ELSEWHERE = {"validate": "check", "proxy-worker": "proxy"}


class Commands(TyperGroup):
    """The command group. It prints exceptions as messages, and tracebacks only on request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # In name only, for who has mistyped one.
        self.commands = {name: TyperCommand(name) for name in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: Any, name: str) -> Any:
        return _command(name) if name in COMMANDS else None

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except SystemExit as end:
            _leave(end.code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError):
            say("Interrupted.")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of a pipe (head, less) has seen enough.
            raise typer.Exit(Exit.OK) from None
        except Exception as error:
            from rolloutctl.known_errors import as_command_error

            known = as_command_error(error)
            if known is None and type(error).__module__.startswith(("click", "typer")):
                raise  # usage errors and exits, which typer reports itself
            _tell(error, known, debug=bool(ctx.params.get(DEBUG)))
            raise typer.Exit(known.code if known else Exit.BUG) from None


def _leave(code: object) -> NoReturn:
    """End the process without finalising the interpreter.

    obstore's threads may still return a result during finalisation and abort the process (exit code 134 in one of three
    short commands; PyO3/pyo3-async-runtimes#40). Everything that must be closed is closed by now.
    """
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a reader of a pipe (head, less) that has seen enough
            output.flush()
    os._exit(code if isinstance(code, int) else Exit.OK if code is None else Exit.FAILED)


def _tell(error: Exception, known: CommandError | None, *, debug: bool) -> None:
    if debug:
        say("".join(traceback.format_exception(error)))
    if known is None:
        say(f"This is a bug in rolloutctl: {type(error).__name__}: {error}", "bold red")
        if not debug:
            say("`rolloutctl --debug …` shows where; please report it.")
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


@app.callback(help="Agentic rollouts: run a job and show its results.")
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", case_sensitive=False, help="Level of log messages on standard error.")
    ] = LogLevel.WARNING,
) -> None:
    logging.basicConfig(level=log_level.value, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _command(name: str) -> Any:
    """Import a command when it is called. Importing all of them takes as long as a short command."""
    module = importlib.import_module(f"rolloutctl.commands.{ELSEWHERE.get(name, name)}")
    alone = typer.Typer(rich_markup_mode=None)
    if hasattr(module, "app"):
        alone.add_typer(module.app, name=name, epilog=EXIT_CODES)
    else:
        alone.command(name, epilog=EXIT_CODES)(getattr(module, name.replace("-", "_")))
    command = typer.main.get_group(alone).commands[name]
    for leaf in command.commands.values() if isinstance(command, TyperGroup) else [command]:
        assert leaf.callback is not None  # a command always has one
        leaf.callback = _called(leaf.callback)
    return command


def _called(command: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(**options: Any) -> None:
        with only_answers_on_stdout():
            if inspect.iscoroutine(made := command(**options)):
                asyncio.run(made)

    return run


if __name__ == "__main__":
    app()

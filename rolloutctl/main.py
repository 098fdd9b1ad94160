"""`rolloutctl`: the command line. One module a command; here they are put together, and errors become messages."""

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

from rolloutctl.errors import EXIT_CODES, CommandError, Exit, as_command_error
from rolloutctl.ui.console import only_answers_on_stdout, say

DEBUG = "debug"


class LogLevel(StrEnum):
    """From which level on messages of the engine and its libraries are shown."""

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
# Those that do not stand in a module of their name.
ELSEWHERE = {"validate": "check", "proxy-worker": "proxy"}


class Commands(TyperGroup):
    """The commands; an exception is told in a sentence, a traceback only if asked for."""

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
            known = as_command_error(error)
            if known is None and type(error).__module__.startswith(("click", "typer")):
                raise  # usage errors and exits, which typer knows how to tell
            _tell(error, known, debug=bool(ctx.params.get(DEBUG)))
            raise typer.Exit(known.code if known else Exit.BUG) from None


def _leave(code: object) -> NoReturn:
    """End the process without taking the interpreter down.

    obstore's threads may still hand a result back while it goes down, and abort the process (exit code 134 in one of three
    short commands; PyO3/pyo3-async-runtimes#40). Everything that has to be closed is by now.
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


@app.callback(help="Agentic rollouts: run a job, see what came of it.")
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", case_sensitive=False, help="What is logged, on standard error.")
    ] = LogLevel.WARNING,
) -> None:
    logging.basicConfig(level=log_level.value, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _command(name: str) -> Any:
    """Imported when it is called: the modules of all of them take as long again as a short command."""
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

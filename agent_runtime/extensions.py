"""Names in a manifest that refer to Python objects: built-ins, entry points, `module:name`, and registered ones."""

import asyncio
import contextlib
import difflib
import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

_TRACEBACK_FRAMES = 20
_CALLERS_OF_USER_CODE = tuple(
    f"{Path(__file__).parent}{os.sep}{inner}"
    for inner in (f"engine{os.sep}", f"plugins{os.sep}", f"tools{os.sep}base.py")
)
_OWN_MODULES = f"{__package__}."
_TRACEBACK_CHARACTERS = 8192
"""Most characters of a recorded traceback. An error's message may repeat all that a model wrote."""
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):\n\n(?=Traceback)"
)
_LONGEST_NAME = 100
"""Names with more characters are not compared with others for suggestions, because a model controls the length and
comparing is slow.
"""

T = TypeVar("T")


class ExtensionError(Exception):
    """A name in the manifest cannot be loaded; the message has the reason and a remedy."""


@contextlib.contextmanager
def contained(*also: type[BaseException]) -> Iterator[None]:
    """Convert a BaseException of user code into an ordinary error of that code.

    `sys.exit()` or `pytest.fail()` in one rollout would otherwise end the run with all rollouts. A CancelledError of
    the code would look like a cancellation of the rollout, which would never get a result. Real cancellations,
    KeyboardInterrupt and GeneratorExit pass unchanged, unless they are in `also`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | GeneratorExit) and not isinstance(error, also):
            raise
        if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__} was raised{f': {error}' if str(error) else ''}") from error


def described(error: BaseException) -> str:
    """Return an error's type and message, even if its `__str__` raises. Of a group with one error, return that error's."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return "".join(traceback.format_exception_only(error)).strip()


def traceback_of(error: BaseException, *, is_of_user: bool = True) -> str:
    """Return the last frames of an error's traceback, and the error itself. The middle of a long text is left out.

    `is_of_user`: leave out the frames of the engine before the first of the user's code, where the mistake is not.
    """
    first = _after_engine(error.__traceback__) if is_of_user else error.__traceback__
    printed = traceback.TracebackException(type(error), error, first, limit=-_TRACEBACK_FRAMES)
    if is_of_user and type(error).__module__.startswith(_OWN_MODULES):
        _leave_out_callees(printed)
    text = "".join(printed.format()).strip()
    half = _TRACEBACK_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n[…]\n{text[-half:]}"


def _after_engine(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its first frames in the engine; the whole one if all its frames are there."""
    later = frames
    while later is not None and later.tb_frame.f_code.co_filename.startswith(_CALLERS_OF_USER_CODE):
        later = later.tb_next
    return later or frames


def _leave_out_callees(printed: traceback.TracebackException) -> None:
    """Leave out the frames of the engine after the user's last one, and the errors behind them. An error of the engine's
    own types, such as a missing file, is its answer to the user's call, so the mistake is at that call.
    """
    while len(printed.stack) > 1 and _is_ours(printed.stack[-1].filename):
        printed.stack.pop()
        printed.__cause__, printed.__suppress_context__ = None, True


def raised_in(traceback_text: str) -> str:
    """Return the error of a traceback with the file and line that raised it, and the first line of its message."""
    place, error = place_and_error(traceback_text)
    return f"{place}: {error}" if place else error


def place_and_error(traceback_text: str) -> tuple[str, str]:
    """Return `file:line` of the frame that raised a traceback's last exception, and the exception's type with the first
    line of its message. The other lines may look like anything, because the policy may have written them.
    """
    lines = _CHAINED.split(traceback_text.rstrip())[-1].splitlines()
    frames = list(itertools.takewhile(lambda line: line.startswith((" ", "Traceback", "[…]")), lines))
    found = [match for line in frames if (match := _FRAME.match(line))]
    error = lines[len(frames)] if len(frames) < len(lines) else lines[-1]
    return f"{found[-1]['file']}:{found[-1]['line']}" if found else "", error


def last_raised(output: str) -> tuple[str, str] | None:
    """Return, as `place_and_error`, what the last traceback in a program's output says; None without one. A program with
    a wrong syntax prints only the last frame.
    """
    lines = output.splitlines()
    last = next((number for number in reversed(range(len(lines))) if _FRAME.match(lines[number])), None)
    if last is None:
        return None
    place, error = place_and_error("\n".join(lines[last:]))
    return (place, error) if re.match(r"[\w.]+(:|$)", error) else None


def failed_with(error: BaseException) -> str:
    """Return `failed in FILE:LINE with TYPE: MESSAGE`, with the last place in the user's code, if there is one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"failed{place} with {type(error).__name__}: {error}"


def create(what: str, name: str, make: Callable[[], T]) -> T:
    """Return the object that a user's class makes. Raises ExtensionError."""
    try:
        with contained():
            return make()
    except Exception as error:
        raise ExtensionError(f"{what} {name!r}: creating it {failed_with(error)}") from error


def load_object(reference: str, what: str) -> Any:
    """Return the object at `module:name`. `what` is its kind for messages (`tool`, `agent`). Raises ExtensionError."""
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a script may call sys.exit()
        hint = ""
        if isinstance(error, ModuleNotFoundError) and module_name.split(".")[0] == (error.name or "").split(".")[0]:
            hint = "; install the package, put the module beside the manifest, or its folder on PYTHONPATH"
        if isinstance(error, ImportError | SyntaxError):  # also of a package or a syntax that another Python has
            version = ".".join(map(str, sys.version_info[:2]))
            hint += f" (this is Python {version}, {sys.executable})"
        raise ExtensionError(f"{what} {reference!r}: importing {module_name} {failed_with(error)}{hint}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        place = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
        raise ExtensionError(
            f"{what} {reference!r}: module {module_name}{place} has no {name!r}{nearest(name, vars(module))}"
        ) from None


def _is_ours(file: str) -> bool:
    """Whether a file of a traceback belongs to this package or to Python's import system."""
    return file.startswith(("<frozen importlib", f"{Path(__file__).parent}{os.sep}")) or file == importlib.__file__


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` if a known name is similar, else an empty string."""
    if len(name) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Registry:
    """One kind of extension. `builtin` maps names to `module:name`, which are imported on demand. `optional` maps names
    of optional entry points to the requirements that install them. `reserved` are names without an object.
    """

    def __init__(
        self,
        what: str,
        group: str,
        builtin: Mapping[str, str],
        optional: Mapping[str, str] = MappingProxyType({}),
        reserved: Sequence[str] = (),
    ) -> None:
        self.what, self.group, self.builtin, self.optional, self.reserved = what, group, builtin, optional, reserved
        self._registered: dict[str, Any] = {}

    def register(self, name: str, thing: Any) -> None:
        """Register `thing` in this process. Registering a name again replaces it, as when a notebook cell runs twice.

        Raises ExtensionError for the name of a built-in, because a manifest must have the same meaning everywhere.
        """
        if name in self.builtin or name in self.optional or name in self.reserved:
            raise ExtensionError(f"{self.what} {name!r} is a built-in; register yours under another name")
        self._registered[name] = thing

    def names(self) -> list[str]:
        """Return every usable name, except `module:name`."""
        own = {*self.builtin, *self.reserved, *self._registered}
        return sorted({*own, *(entry.name for entry in entry_points(group=self.group))})

    def find(self, name: str) -> Any:
        """Return the object with a name. Raises ExtensionError."""
        if ":" in name:
            return load_object(name, self.what)
        if name in self._registered:
            return self._registered[name]
        if name in self.builtin:
            return load_object(self.builtin[name], self.what)
        entries = list(entry_points(group=self.group, name=name))
        if len({entry.value for entry in entries}) > 1:
            owners = " and ".join(f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in entries)
            raise ExtensionError(f"{self.what} {name!r} comes from {owners}; uninstall one, or name yours module:name")
        if entries:
            return load_object(entries[0].value, f"{self.what} {name!r} =")
        if name in self.optional:
            raise ExtensionError(
                f"{self.what} {name!r} is not installed: no installed package has an entry point of this name in "
                "the group "
                f"{self.group}. Run: pip install '{self.optional[name]}'. In a checkout, run: pip install -e ."
            )
        raise ExtensionError(
            f"no {self.what} is named {name!r}{nearest(name, self.names())}. Available: {', '.join(self.names())}. "
            f"A package can add one by an entry point in the group {self.group}; module:name always works"
        )

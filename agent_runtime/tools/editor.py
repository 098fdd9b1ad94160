"""View and edit files in the sandbox, with undo.

Undo must survive a crash of the runner, so earlier versions are files in the workspace, outside the working directory.
Bytes that are not UTF-8 pass through an edit unchanged, as lone surrogates (PEP 383).
"""

import hashlib
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agent_runtime.sandboxes.base import FileError
from agent_runtime.tools.base import FunctionTool, ToolContext, ToolError, ToolWorkspace

FILE_BYTES = 1 << 20
"""Largest file that can be edited: the executor's limit for a read with a key."""
VIEW_CHARACTERS = 48_000
"""Characters of one view: even multi-byte text mostly fits into one observation."""
SNIPPET_LINES = 4  # around an edit
UNDO_FOLDER = "/tmp/.editor-undo"
UNDO_VERSIONS = 20  # kept of one file

Command = Literal["view", "create", "str_replace", "insert", "undo_edit"]


@dataclass(frozen=True)
class File:
    """A file being edited: `newline` is `\\r\\n` if every line ends with it; the text then has `\\n`."""

    path: str
    mode: str
    data: bytes

    @property
    def newline(self) -> str:
        return "\r\n" if b"\r\n" in self.data and self.data.count(b"\r\n") == self.data.count(b"\n") else "\n"

    @property
    def text(self) -> str:
        return self.data.decode(errors="surrogateescape").replace(self.newline, "\n")

    def encoded(self, text: str) -> bytes:
        """Return new text as its bytes. Raises ToolError for text that UTF-8 cannot represent."""
        try:
            return text.replace("\r\n", "\n").replace("\n", self.newline).encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ToolError(
                f"the new text has a lone surrogate at character {error.start}; write whole characters"
            ) from error


def numbered(text: str, first: int, last: int) -> str:
    """Return lines `first` to `last`, counted from 1, with their numbers; invalid bytes as `\\xNN`."""
    lines = lines_of(text)[first - 1 : last]
    plain = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, start=first))
    return plain.encode(errors="surrogateescape").decode(errors="backslashreplace")


def lines_of(text: str) -> list[str]:
    """Return lines without their ends; a final line end adds no further line."""
    return text.removesuffix("\n").split("\n") if text else []


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """Return text with the only occurrence of `old` replaced, and its line. Raises ToolError unless there is exactly
    one.
    """
    if not old:
        raise ToolError("old_str is empty; give the text to replace, or use the command insert")
    count = text.count(old)
    if not count:
        raise ToolError("old_str does not occur; it must match exactly, white space included. View the file first")
    at = text.find(old)
    first = text.count("\n", 0, at) + 1
    again = text.find(old, at + 1)  # overlapping occurrences, which count leaves out, are ambiguous too
    if again >= 0:
        second = text.count("\n", 0, again) + 1
        raise ToolError(
            f"old_str occurs {max(count, 2)} times, first at lines {first} and {second}; add lines until it is unique"
        )
    return text.replace(old, new, 1), first


def inserted(text: str, after: int, new: str) -> str:
    """Return text with `new` inserted as lines after line `after` (0: at the top). Raises ToolError out of range."""
    lines = lines_of(text)
    if not 0 <= after <= len(lines):
        raise ToolError(f"insert_line is {after}, but the file has {len(lines)} lines; give 0 to {len(lines)}")
    end = "\n" if text.endswith("\n") or not text else ""
    return "\n".join([*lines[:after], new.removesuffix("\n"), *lines[after:]]) + end


def view_bounds(view_range: Sequence[int] | None, lines: int) -> tuple[int, int]:
    """Return the first and last line to show. Raises ToolError for a range outside the file."""
    if view_range is None:
        return 1, lines
    first, last = view_range[0], lines if view_range[1] == -1 else min(view_range[1], lines)
    if first < 1 or (first > last and lines):
        raise ToolError(
            f"view_range {list(view_range)} is not in the file, which has {lines} lines; "
            "give [first, last], counted from 1, last -1 for the end"
        )
    return first, last


class Versions:
    """Earlier versions of one file, oldest first: `<n>.data`, or `<n>.absent` where there was no file."""

    def __init__(self, workspace: ToolWorkspace, path: str) -> None:
        self._workspace = workspace
        self._folder = f"{UNDO_FOLDER}/{hashlib.sha256(path.encode(errors='replace')).hexdigest()[:16]}"

    async def push(self, file: File | None) -> None:
        numbers = await self._numbers()
        newest = max(numbers, default=0) + 1
        suffix, data = ("absent", b"") if file is None else ("data", file.data)
        await self._workspace.write(f"{self._folder}/{newest}.{suffix}", data)
        for number in sorted(numbers)[: max(0, len(numbers) + 1 - UNDO_VERSIONS)]:
            await self._workspace.remove(f"{self._folder}/{number}.{numbers[number]}")

    async def newest(self) -> tuple[str, bytes | None] | None:
        """Return the path of the newest version, and its bytes (None: there was no file); None if there is no version."""
        numbers = await self._numbers()
        if not numbers:
            return None
        newest = max(numbers)
        path = f"{self._folder}/{newest}.{numbers[newest]}"
        return path, await self._workspace.read(path, limit=FILE_BYTES) if numbers[newest] == "data" else None

    async def _numbers(self) -> dict[int, str]:
        if await self._workspace.stat(self._folder) is None:
            return {}
        names = [entry.name.partition(".") for entry in await self._workspace.list(self._folder)]
        return {int(number): suffix for number, _, suffix in names if number.isdigit() and suffix in ("data", "absent")}


async def _existing(workspace: ToolWorkspace, path: str) -> File | None:
    """Return the file at a path, following links. Raises ToolError for a file that cannot be edited."""
    stat = await workspace.stat(path)
    if stat is not None and stat.type == "link":
        # Edit a link's target, because writing would replace the link.
        resolved = await workspace.run(["readlink", "-f", path])
        path = resolved.stdout.decode(errors="surrogateescape").removesuffix("\n") or path
        stat = await workspace.stat(path)
    if stat is None:
        return None
    if stat.type != "file":
        raise ToolError(f"{path} is a {stat.type}, not a file")
    if stat.size > FILE_BYTES:
        raise ToolError(
            f"{path} has {stat.size} bytes, more than the editor's limit of {FILE_BYTES}; "
            "use the shell, for instance sed -n '100,200p'"
        )
    data = await workspace.read(path, limit=FILE_BYTES)
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file; use the shell, for instance od or xxd")
    return File(path, f"{stat.mode & 0o777:o}", data)


async def _edit(workspace: ToolWorkspace, versions: Versions, file: File, text: str, line: int, added: str) -> str:
    data = file.encoded(text)
    if len(data) > FILE_BYTES:
        raise ToolError(f"{file.path} would have {len(data)} bytes, more than the editor's limit of {FILE_BYTES}")
    await versions.push(file)
    await workspace.write(file.path, data, mode=file.mode)
    first = max(1, line - SNIPPET_LINES)
    snippet = numbered(text, first, line + added.count("\n") + SNIPPET_LINES)
    return f"{file.path} is edited. It is now, around the edit:\n{snippet}"


async def _view(workspace: ToolWorkspace, path: str, view_range: Sequence[int] | None) -> str:
    stat = await workspace.stat(path)
    if stat is not None and stat.type == "folder":
        entries = await workspace.list(path)
        names = [entry.name + ("/" if entry.type == "folder" else "") for entry in entries]
        return "\n".join([f"{path} is a folder:", *names]) if names else f"{path} is an empty folder"
    file = await _existing(workspace, path)
    if file is None:
        raise ToolError(f"{path} does not exist")
    total = len(lines_of(file.text))
    if not total:
        return f"{path} is empty"
    first, last = view_bounds(view_range, total)
    shown = numbered(file.text, first, last)
    if len(shown) > VIEW_CHARACTERS:
        cut = shown[:VIEW_CHARACTERS]
        at = first + cut.count("\n")
        return f"{cut}\n[cut in line {at}; {total} lines in all, see the rest with view_range [{at}, {last}]]"
    return shown


async def _create(workspace: ToolWorkspace, versions: Versions, path: str, text: str) -> str:
    before = await _existing(workspace, path)
    data = File(path, "644", b"").encoded(text)
    await versions.push(before)
    await workspace.write(before.path if before else path, data, mode=before.mode if before else "644")
    return f"{path} is {'replaced' if before else 'created'}, {len(data)} bytes"


async def _undo(workspace: ToolWorkspace, versions: Versions, path: str) -> str:
    newest = await versions.newest()
    if newest is None:
        raise ToolError(f"there is no edit of {path} to undo; at most {UNDO_VERSIONS} are kept")
    kept, data = newest
    if data is None:
        await workspace.remove(path)
    else:
        now = await _existing(workspace, path)
        await workspace.write(now.path if now else path, data, mode=now.mode if now else "644")
    await workspace.remove(kept)
    return f"{path} is removed again" if data is None else f"{path} is as it was before its last edit"


def _needed(value: str | None, name: str, command: str) -> str:
    if value is None:
        raise ToolError(f"{name} is needed for the command {command}")
    return value


@FunctionTool
async def editor(
    context: ToolContext,
    command: Command,
    path: Annotated[str, "File, or folder for view; absolute or relative to the working directory."],
    file_text: Annotated[str | None, "create: the whole content."] = None,
    old_str: Annotated[str | None, "str_replace: the text to replace; it must occur exactly once."] = None,
    new_str: Annotated[str | None, "str_replace, insert: the new text; nothing for str_replace to delete."] = None,
    insert_line: Annotated[int | None, "insert: the line after which the text goes; 0 for the top."] = None,
    view_range: Annotated[
        list[int] | None,
        Field(min_length=2, max_length=2, description="view: first and last line, from 1; last -1 for the end."),
    ] = None,
) -> str:
    """View and edit text files. `view` shows a file with line numbers, or a folder; `create` writes a whole file;
    `str_replace` replaces a text that occurs exactly once; `insert` adds lines after a line; `undo_edit` takes the last
    edit of a file back."""
    workspace = context.workspace
    if "\0" in path:
        raise ToolError("path has a NUL character")
    path = posixpath.normpath(posixpath.join(workspace.working_dir, path))
    versions = Versions(workspace, path)
    try:
        if command == "view":
            return await _view(workspace, path, view_range)
        if command == "create":
            return await _create(workspace, versions, path, _needed(file_text, "file_text", command))
        if command == "undo_edit":
            return await _undo(workspace, versions, path)
        file = await _existing(workspace, path)
        if file is None:
            raise ToolError(f"{path} does not exist; make it with the command create")
        if command == "str_replace":
            old, new = (text.replace("\r\n", "\n") for text in (_needed(old_str, "old_str", command), new_str or ""))
            text, line = replaced(file.text, old, new)
            return await _edit(workspace, versions, file, text, line, new)
        new = _needed(new_str, "new_str", command).replace("\r\n", "\n")
        if insert_line is None:
            raise ToolError("insert_line is needed for the command insert")
        text = inserted(file.text, insert_line, new)
        return await _edit(workspace, versions, file, text, insert_line + 1, new)
    except FileError as error:
        raise ToolError(f"{path}: {error}") from error

"""Search text, files and folders in the sandbox with grep and find, which every image has, busybox included."""

import posixpath
import shlex
from typing import Annotated, Literal

from pydantic import Field

from agent_runtime.tools.base import FunctionTool, ToolContext, ToolError
from agent_runtime.tools.bash import how_it_ended

LINE_CHARACTERS = 400  # limit of a matching line, because minified files have lines of megabytes
OUTPUT_BYTES = 60 * 1024  # below an observation's limit, so that the note at the end is visible


def search_command(kind: str, pattern: str, path: str, name: str, max_results: int) -> str:
    """Return the shell command of a search below an absolute path. It finds one result more than requested, to detect
    that there are more.
    """
    below = f"find {shlex.quote(path)} -name .git -prune -o"
    match kind:
        case "text":
            found = f"-type f -name {shlex.quote(name)} -exec grep -HnIE -e {shlex.quote(pattern)} -- {{}} +"
        case "files":
            found = f"-type f -name {shlex.quote(_glob(pattern))} -print"
        case _:
            found = f"-type d -name {shlex.quote(_glob(pattern))} -print"
    in_order = "" if kind == "text" else " | sort"
    return f"{below} {found}{in_order} | head -n {max_results + 1} | cut -c 1-{LINE_CHARACTERS}"


def _glob(pattern: str) -> str:
    return pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"


@FunctionTool
async def search(
    context: ToolContext,
    pattern: Annotated[
        str, Field(min_length=1, description="text: an extended regular expression; else a name or glob.")
    ],
    kind: Annotated[
        Literal["text", "files", "folders"], "text: lines of files that match; files, folders: those with such a name."
    ] = "text",
    path: Annotated[str, "Folder to search below, or a file."] = ".",
    name: Annotated[str, "text: only in files with such a name, for instance *.py."] = "*",
    max_results: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> str:
    """Search below a folder: text in files, files by name, or folders by name. `.git` and binary files are left out."""
    working_dir = context.workspace.working_dir
    absolute = posixpath.normpath(posixpath.join(working_dir, path))
    if any("\0" in text for text in (pattern, absolute, name)) or "\n" in pattern:
        raise ToolError("a pattern is one line, and neither it nor a path has NUL characters")
    result = await context.workspace.run(
        search_command(kind, pattern, absolute, name, max_results), head_bytes=OUTPUT_BYTES, tail_bytes=0
    )
    lines = result.stdout.decode(errors="replace").splitlines()
    if result.cause is not None:
        raise ToolError(f"the search did not end ({how_it_ended(result)}); search below a smaller folder")
    if not lines:
        complaint = result.stderr.decode(errors="replace").strip()
        if complaint:
            raise ToolError(complaint)
        return f"Nothing found for {pattern!r} below {path}."
    shown = [line.removeprefix(f"{working_dir.rstrip('/')}/") for line in lines[:max_results]]
    if len(lines) > max_results or result.stdout_omitted:
        shown.append(f"[more than {len(shown)} results; narrow the pattern or the path]")
    return "\n".join(shown)

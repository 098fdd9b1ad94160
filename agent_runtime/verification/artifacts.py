"""Which of the agent's files are carried into the workspace that grades them.

What Python and pytest load without being asked to is never carried: the grading keeps the version of the prepared state,
or none. A task whose solution lies in such a file names it in `verifier.artifacts`. docs/verification.md tells what this
closes, and what it cannot.
"""

import hashlib
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import PurePosixPath

from agent_runtime.tasks.loaded_by_python import LOADED_BY_THEMSELVES, METADATA_SUFFIXES, SHADOWED
from agent_runtime.verification.tar_filter import Dropped, Member, MemberType, members
from rollout_api.tasks import TaskFile

DROPPED_SHOWN = 100
"""Most names that a verdict lists; an agent can leave millions."""

_EXTENSIONS = (".so", ".pyd")

Prepared = Mapping[str, str]
"""The working directory before the agent came: relative path to SHA-256 of a file, empty for anything else."""

NOT_DECLARED = "is not among verifier.artifacts"
COMPILED = "is compiled code, which Python prefers to its source"
_NOT_TOLD = frozenset({NOT_DECLARED, COMPILED})
"""Every agent that runs Python leaves compiled code behind; to tell of it would only hide what was planted."""


async def listing(chunks: AsyncIterator[bytes]) -> dict[str, str]:
    """The listing of a prepared state from the tar of its working directory. Raises BrokenTar."""
    found: dict[str, str] = {}
    async for member, content in members(chunks):
        digest = hashlib.sha256()
        async for chunk in content:
            digest.update(chunk)
        found[member.name] = digest.hexdigest() if member.type == "file" else ""
    return found


def carry_rule(
    prepared: Prepared, artifacts: Sequence[str], hidden: Sequence[TaskFile], working_dir: str
) -> Callable[[Member], str | None]:
    """The decision about one member of the agent's working directory: None to carry it, or why it is dropped."""
    declared = [posixpath.normpath(path) for path in artifacts]
    hidden_paths = [PurePosixPath(path) for file in hidden if (path := _relative(file.path, working_dir))]
    hidden_folders = {str(path.parent) for path in hidden_paths}
    hidden_modules = {str(path.with_suffix("")) for path in hidden_paths if path.suffix == ".py"}
    environments = {posixpath.dirname(name) for name in prepared if posixpath.basename(name) == "pyvenv.cfg"}
    import_roots = {".", *hidden_folders} | {
        folder for name in prepared if f"{(folder := posixpath.dirname(name))}/__init__.py" not in prepared
    }

    def drop(member: Member) -> str | None:
        name = member.name
        path = PurePosixPath(name)
        if not any(_within(name, folder) for folder in declared):
            return (
                None if any(_within(folder, name) for folder in declared) and member.type == "folder" else NOT_DECLARED
            )
        if member.type == "other":
            return "is no file, folder or link"
        if member.type in ("link", "hardlink") and _leaves(member):
            return f"links to {member.target!r}, outside of the working directory"
        if name in declared:
            return None
        if any(_within(name, folder) for folder in environments):
            return "belongs to the prepared Python environment"
        if path.name in LOADED_BY_THEMSELVES or path.suffix == ".pth":
            return "is loaded by Python, pytest or their tools by itself"
        if "__pycache__" in path.parts or path.suffix in (".pyc", ".pyo"):
            return COMPILED
        if any(part.endswith(METADATA_SUFFIXES) for part in path.parts):
            return "is package metadata, which can register pytest plugins"
        if _shadows_hidden(path, member.type, hidden_modules):
            return "would be imported in place of a hidden file"
        if name in prepared:
            return None
        if path.name == "__init__.py" and str(path.parent) in hidden_folders - {"."}:
            return "would be run before the hidden tests beside it"
        if (
            (module := _imported_as(path, member.type))
            and str(module.parent) in import_roots
            and _is_shadowed(module.name)
        ):
            return f"would be imported in place of {module.name}"
        return None

    return drop


def dropped_names(dropped: Sequence[Dropped], prepared: Prepared) -> list[str]:
    """What a verdict tells of what was dropped: what the agent planted, and not what it left as it was."""
    told = [
        f"{item.member.name} {item.reason}"
        for item in dropped
        if item.reason not in _NOT_TOLD
        and item.member.type != "folder"
        and (item.member.name not in prepared or prepared[item.member.name] != item.sha256)
    ]
    rest = len(told) - DROPPED_SHOWN
    return [*told[:DROPPED_SHOWN], f"… and {rest} more"] if rest > 0 else told


def _relative(path: str, working_dir: str) -> str | None:
    """A file's path relative to the working directory; None when it lies outside."""
    full = posixpath.normpath(posixpath.join(working_dir, path))
    return posixpath.relpath(full, working_dir) if _within(full, posixpath.normpath(working_dir)) else None


def _within(name: str, folder: str) -> bool:
    return folder in (".", name) or name.startswith(folder.rstrip("/") + "/")


def _leaves(member: Member) -> bool:
    """Whether a link may lead out. `..` is allowed at its beginning only, where no other link can have come before it."""
    target = member.target
    parts = target.split("/")
    ups = next((i for i, part in enumerate(parts) if part not in ("..", ".")), len(parts))
    if target.startswith("/") or ".." in parts[ups:]:
        return True
    if member.type == "hardlink":  # its target is relative to the root of the tar
        return ".." in parts
    depth = member.name.count("/")
    return parts[:ups].count("..") > depth


def _shadows_hidden(path: PurePosixPath, kind: MemberType, modules: set[str]) -> bool:
    """A package, an extension module and a link to either come before the source file of the same name."""
    if path.name == "__init__.py" or path.name.endswith(_EXTENSIONS) or kind == "link":
        return str(_imported_as(path, kind)) in modules
    return False


def _imported_as(path: PurePosixPath, kind: MemberType) -> PurePosixPath | None:
    """The module that a path is imported as, its folders in front; None for what is not imported.

    A folder is imported for its `__init__.py`; a link may lead to such a folder.
    """
    stem = path.name.partition(".")[0]
    if path.suffix == ".py" or path.name.endswith(_EXTENSIONS) or (kind == "link" and not path.suffix):
        return path.parent if stem == "__init__" else path.parent / stem
    return None


def _is_shadowed(name: str) -> bool:
    return name in SHADOWED or name.startswith("pytest_")

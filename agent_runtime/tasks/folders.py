"""Tasks that are folders: one folder, or many below one, on this machine or in object storage."""

import json
import os
import posixpath
import stat
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import yaml
from pydantic import ValidationError

from agent_runtime.extensions import described
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError, left_out
from agent_runtime.tasks.table import RowFilter, ordered
from rollout_api.files import ContextFile, TaskFile
from rollout_api.tasks import Task

FILE_BYTES = 64 << 20
"""Largest file of a task folder: the limit of base64 in `TaskFile`."""

EXECUTABLES = ".executables.json"
"""File in the folder of `tasks.from.uri` that lists its executable files, because object storage has no file modes."""

_READ_FOLDERS = ("tests/", "solution/", "steps/")
"""Folders whose files are read, even where they are part of a build context."""

READERS = 16
"""Concurrent requests to object storage."""


@dataclass(frozen=True)
class Folder:
    """A task's folder."""

    name: str
    where: str
    """Path or URI of the folder, for messages."""
    files: Mapping[str, Callable[[], bytes]]
    """Functions that read the files, by path relative to the folder, sorted."""
    executable: frozenset[str] = frozenset()
    """Files with the x bit; in object storage, those listed in `EXECUTABLES`."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permission bits; empty in object storage without `EXECUTABLES`."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Targets of symbolic links."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Problems of entries that are not in `files`. Links among them can be part of a build context."""
    _read: dict[str, bytes] = field(default_factory=dict, compare=False)

    def read(self, path: str) -> bytes:
        """Return a file's bytes, read once."""
        if path not in self._read:
            self._read[path] = self.files[path]()
        return self._read[path]

    def text(self, path: str) -> str:
        """Return a file's text. Raises UnicodeDecodeError."""
        return self.read(path).decode("utf-8-sig")

    def is_executable(self, path: str) -> bool:
        """Whether a file is executable. Scripts always are, because file modes may be lost in storage."""
        return path in self.executable or path.endswith(".sh") or self.read(path).startswith(b"#!")

    def below(self, folder: str) -> list[str]:
        """Return paths of the files below one of its folders; "" is the whole."""
        return [path for path in self.files if not folder or path.startswith(f"{folder}/")]

    def as_files(self, folder: str, target: str) -> list[TaskFile]:
        """Return the files below one of its folders as files of a task below `target`. Raises ValidationError."""
        return [
            self.as_file(path, posixpath.join(target, path.removeprefix(f"{folder}/"))) for path in self.below(folder)
        ]

    def as_file(self, path: str, target: str) -> TaskFile:
        """Return one of its files as a file of a task."""
        mode = "755" if self.is_executable(path) else "644"
        return TaskFile(path=target, content_base64=b64encode(self.read(path)).decode(), mode=mode)

    def as_context(self, folder: str) -> list[ContextFile]:
        """Return a folder as a build context, with the links and modes that Docker would see."""
        prefix = f"{folder}/" if folder else ""
        paths = [*self.below(folder), *(path for path in self.unusable.keys() & self.links if path.startswith(prefix))]
        return [self._in_context(path, path.removeprefix(prefix)) for path in paths]

    def _in_context(self, path: str, name: str) -> ContextFile:
        if path in self.links:
            return ContextFile(path=name, link=self.links[path])
        mode = self.modes.get(path, 0o755 if self.is_executable(path) else 0o644)
        return ContextFile(path=name, content_base64=b64encode(self.read(path)).decode(), mode=f"{mode:03o}")


@dataclass(frozen=True)
class Build:
    """An image that a task needs, to be built from one of its folders."""

    image: str
    folder: Folder
    context: str
    """Path of the build context in the folder, which includes the Dockerfile."""
    seconds: float
    """Time limit of the build."""
    digest: str
    """Digest of the build context."""


LIST_VARIABLE = "list it in tasks.from.variables, and set it where the job runs"
"""What to do about a variable that a task lacks."""


def variable_missing(name: str) -> str:
    """Return the message for a variable that a task cannot do without."""
    return f"needs the environment variable {name}; {LIST_VARIABLE}"


@dataclass
class Notes:
    """Problems of one folder, unsupported settings, and the images that it needs."""

    where: str
    builds: list[Build] = field(default_factory=list)
    problems: list[TaskProblem] = field(default_factory=list)
    warnings: list[tuple[str, int | None, str]] = field(default_factory=list)
    """File, line, message."""
    contexts: list[str] = field(default_factory=list)
    """Folders that are build contexts of this job."""

    def variable(self, file: str, place: SourcePlace, name: str) -> str | None:
        """Return a variable of the environment in which the job runs, for a task's file. It may be a key, which others'
        tasks could read, so the job's author lists those that its tasks may have.
        """
        if name in place.source.variables:
            return place.environ.get(name)
        if name in place.environ:
            self.report(file, f"does not get the environment variable {name}: tasks.from.variables does not list it")
        return None

    def refuse(self, file: str, message: str, line: int | None = None) -> None:
        """Record that the task cannot be used."""
        self.problems.append(TaskProblem(f"{self.where}/{file}", line, message))

    def check_script(self, folder: Folder, file: str) -> None:
        """Refuse a script that no shell can run."""
        if folder.read(file).split(b"\n", 1)[0].endswith(b"\r"):
            self.refuse(file, "has Windows line ends, so no shell can run it; convert it, for example with dos2unix")

    def report(self, file: str, message: str, line: int | None = None) -> None:
        """Record a warning about a setting that has no effect."""
        self.warnings.append((file, line, message))


@dataclass(frozen=True)
class FolderFormat:
    """How one kind of folder is detected and read."""

    marker: str
    """The file that marks a folder as a task."""
    columns: Callable[[Folder, Notes], Mapping[str, Any]]
    """Columns for `tasks.from.filter`."""
    task: Callable[[Folder, Notes, SourcePlace], Task | None]
    """Returns the task, or None with at least one problem in the notes."""


def read_folders(place: SourcePlace, form: FolderFormat) -> tuple[LoadedTasks, list[Build]]:
    """Return the tasks of a folder, or of the folders below one, by name, and the images that they need.

    Raises TaskSourceError with all problems.
    """
    if place.source.columns:
        raise place.refused("tasks.from.columns is only for files with columns; remove it for folders")
    folders = find_folders(place, form.marker)
    notes = [Notes(folder.where) for folder in folders]
    filtered = RowFilter(place.source.filter)
    positions: list[int] = list(range(len(folders)))
    with place.readable():
        if place.source.filter:
            positions = [p for p in positions if filtered.passes(_columns(form, folders[p], notes[p]))]
            if not positions:
                raise place.refused(filtered.nothing_passed(len(folders), "task"))
        chosen, tasks, unusable = dict[str, int](), list[Task](), list[list[TaskProblem]]()
        for p in ordered(positions, place.source):
            task = _checked(form, folders[p], notes[p], place)
            if task is not None and task.name in chosen:
                other = folders[chosen[task.name]].where
                message = f"a task named {task.name!r} already exists in {other}; rename one of the folders"
                notes[p].problems.append(TaskProblem(folders[p].where, None, message))
            if task is None or notes[p].problems:
                unusable.append(notes[p].problems)
                continue
            tasks.append(task)
            chosen[task.name] = p
            if len(chosen) == place.source.limit:
                break
    if unusable and not place.source.skip_unusable:
        raise TaskSourceError([problem for problems in unusable for problem in problems])
    warnings = [*filtered.warnings(place.uri), *left_out(place.uri, unusable, len(unusable) + len(chosen))]
    noted = [notes[p] for p in chosen.values()]
    builds = [build for note in noted for build in note.builds]
    known: dict[str, Build] = {}
    for build in builds:
        first = known.setdefault(build.image, build)
        if first.digest != build.digest:
            message = (
                f"{build.image} would also be the image of {first.folder.where}, whose Dockerfile or context differs"
            )
            raise TaskSourceError(
                [TaskProblem(build.folder.where, None, f"{message}; add {{digest}} to tasks.imageTemplate")]
            )
    return LoadedTasks(tasks, [*warnings, *_merged_warnings(noted)]), builds


def find_folders(place: SourcePlace, marker: str) -> list[Folder]:
    """Return every folder with a file of that name. Folders inside such a folder are skipped. Raises TaskSourceError."""
    with place.readable():
        path = place.local_path
        folders = _stored(place, marker) if path is None else _local(path, place, marker)
    if not folders:
        raise place.refused(f"has no folder with a {marker}; see tasks.from.uri")
    return sorted(folders, key=lambda folder: folder.where)


def _local(root: Path, place: SourcePlace, marker: str) -> list[Folder]:
    if not root.is_dir():
        raise place.unreadable("the folder does not exist")
    found: list[Folder] = []
    listed = _listed_locally(root)
    for folder, names, files in os.walk(root):
        if marker in files:
            names.clear()
            found.append(_local_folder(Path(folder), _relative_to(listed, os.path.relpath(folder, root))))
        names[:] = sorted(name for name in names if name != ".git")
    return found


def executable_files(root: Path) -> list[str]:
    """Return the contents of `EXECUTABLES` for a local folder: paths relative to it, sorted. Raises TaskSourceError."""
    files = (path for path in root.rglob("*") if path.is_file() and _is_executable(path))
    return sorted({path.relative_to(root).as_posix() for path in files} | _listed_locally(root))


def _listed_locally(root: Path) -> frozenset[str]:
    """Return the list in a folder that was copied from object storage, which has no modes."""
    file = root / EXECUTABLES
    return _listed(file.read_bytes(), str(file)) if file.is_file() else frozenset()


def _listed(data: bytes, where: str) -> frozenset[str]:
    try:
        paths = json.loads(data)
    except ValueError:
        paths = None
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        message = 'expected a JSON list of paths relative to its folder, such as ["task/tests/helper"]'
        raise TaskSourceError([TaskProblem(where, None, message)])
    return frozenset(paths)


def _relative_to(paths: frozenset[str], folder: str) -> frozenset[str]:
    """Return paths relative to the folder, which is "." or "" for the whole."""
    return paths if folder in ("", ".") else frozenset(p[len(folder) + 1 :] for p in paths if _is_below(p, folder))


def _is_executable(path: Path) -> bool:
    """Whether the owner's x bit is set, as in git, independent of the calling user."""
    return bool(path.stat().st_mode & stat.S_IXUSR)


def _local_folder(root: Path, listed: frozenset[str]) -> Folder:
    paths: dict[str, Path] = {}
    links: dict[str, str] = {}
    unusable: dict[str, str] = {}
    real = root.resolve()
    for folder, names, files in os.walk(real):
        for name in [*files, *(name for name in names if os.path.islink(f"{folder}/{name}"))]:
            path = Path(folder) / name
            inside, message = path.relative_to(real).as_posix(), _unusable(path, real)
            if path.is_symlink():
                links[inside] = os.readlink(path)
            if message is None:
                paths[inside] = path
            else:
                unusable[inside] = message
    paths.pop(EXECUTABLES, None)
    readers = {name: paths[name].read_bytes for name in sorted(paths)}
    executable = frozenset(name for name, path in paths.items() if _is_executable(path)) | listed
    modes = {name: stat.S_IMODE(path.stat().st_mode) & 0o777 for name, path in paths.items()}
    modes |= dict.fromkeys(listed & modes.keys(), 0o755)
    return Folder(real.name, str(root), readers, executable, modes, links, unusable)


def _unusable(path: Path, root: Path) -> str | None:
    """Return why a file cannot be part of a task's folder; None if it can."""
    target = Path(os.path.realpath(path))  # Path.resolve raises for loops of links
    if not target.is_relative_to(root):
        return f"is a link out of the task's folder, to {target}; replace it by the file"
    if target.is_dir():
        return "is a link to a folder; replace it by the folder"
    if not target.is_file():
        return "is a dangling link; remove it" if path.is_symlink() else "is not a regular file; remove it"
    size = target.stat().st_size
    return _too_large(size) if size > FILE_BYTES else None


def _stored(place: SourcePlace, marker: str) -> list[Folder]:
    store, sizes = place.store_below(), {}
    for batch in obstore.list(store):
        sizes.update({meta["path"]: meta["size"] for meta in batch})
    roots = sorted(posixpath.dirname(key) for key in sizes if posixpath.basename(key) == marker)
    roots = [root for root in roots if not any(_is_below(root, other) for other in roots if other != root)]
    base = place.uri.rstrip("/")
    listed = frozenset[str]()
    is_listed = sizes.pop(EXECUTABLES, None) is not None
    if is_listed:
        listed = _listed(_getter(store, EXECUTABLES)(), f"{base}/{EXECUTABLES}")
    folders = []
    for root in roots:
        keys = {key.removeprefix(f"{root}/" if root else ""): key for key in sizes if not root or _is_below(key, root)}
        where = f"{base}/{root}" if root else base
        unusable = {path: _too_large(sizes[key]) for path, key in keys.items() if sizes[key] > FILE_BYTES}
        files = {path: _getter(store, keys[path]) for path in sorted(keys) if path not in unusable}
        executable = _relative_to(listed, root)
        modes = {path: 0o755 if path in executable else 0o644 for path in files} if is_listed else {}
        folders.append(Folder(posixpath.basename(where), where, files, executable, modes, unusable=unusable))
    return folders


def prefetch(folder: Folder) -> None:
    """Read all files of a folder concurrently, because each is a request in object storage."""
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(folder.read, folder.files))


def _getter(store: Any, key: str) -> Callable[[], bytes]:
    return lambda: bytes(obstore.get(store, key).bytes())


def _is_below(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _too_large(size: int) -> str:
    return f"has {size} bytes; the limit is {FILE_BYTES}; put it into the task's image"


def tags_of(described: Mapping[str, Any]) -> list[str]:
    """Return the tags of a task from `tags` of its description, a list or one text, and `category` and `difficulty`."""
    tags = described.get("tags")
    listed = [tags] if isinstance(tags, str) else [] if tags is None else list(tags)
    values = [*listed, described.get("category"), described.get("difficulty")]
    return [str(value) for value in values if isinstance(value, str | int | float) and value != ""]


def _columns(form: FolderFormat, folder: Folder, notes: Notes) -> Mapping[str, Any]:
    name = {"name": folder.name}
    try:
        return name if form.marker in folder.unusable else form.columns(folder, notes)
    except TaskSourceError:
        raise
    except _ODD:
        return name  # the problem is reported if the folder is selected


_ODD = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, yaml.YAMLError)
"""What reading a value of an unexpected type raises, also in the libraries that parse TOML and YAML."""


def _checked(form: FolderFormat, folder: Folder, notes: Notes, place: SourcePlace) -> Task | None:
    if place.local_path is None:
        prefetch(folder)
    if form.marker in folder.unusable:
        notes.refuse(form.marker, folder.unusable[form.marker])
        return None
    try:
        task = form.task(folder, notes, place)
        for path, message in folder.unusable.items():
            is_copied = path in folder.links and any(_is_below(path, context) for context in notes.contexts)
            if not is_copied or path.startswith(_READ_FOLDERS):
                notes.refuse(path, message)
        return task if not notes.problems else None
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            field_path = ".".join(str(part) for part in problem["loc"])
            notes.refuse(form.marker, f"does not define a valid task: {field_path}: {problem['msg']}")
    except UnicodeDecodeError as error:
        notes.refuse(form.marker, f"a text of the task is not UTF-8: {error.reason}")
    except TaskSourceError as error:
        notes.problems.extend(error.problems)
    except _ODD as error:
        notes.refuse(form.marker, f"has a value that its format does not have: {described(error)}")
    return None


def _merged_warnings(notes: Sequence[Notes]) -> list[TaskProblem]:
    """Combine equal warnings into one, with the first task and the number of others."""
    found: dict[tuple[str, str], list[TaskProblem]] = {}
    for note in notes:
        for file, line, message in note.warnings:
            found.setdefault((file, message), []).append(TaskProblem(f"{note.where}/{file}", line, message))
    return [
        same[0]
        if len(same) == 1
        else TaskProblem(same[0].source, same[0].line, f"{same[0].message} (and in {len(same) - 1} more tasks)")
        for same in found.values()
    ]

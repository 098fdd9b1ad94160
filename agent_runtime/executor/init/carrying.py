"""Brings the tar of an agent's tree into a prepared folder, without what would let the agent decide its own verdict.

docs/verification.md has the steps, and the table of what is dropped. A tar may hold several files and folders of the agent,
the roots: each goes into its place by itself. When all are there, what the agent planted where modules and commands are
looked for is removed, for a link of one root may lead into another. Nothing before that follows a link, so a name in the tar
is the place where its file will be. No process of the agent runs meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Literal, cast

from agent_runtime.executor.init.archives import COPY_BYTES, PATH_BYTES, walk
from agent_runtime.executor.init.channel import Message
from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.trees import NO_WAIT, make_writable, open_folder, remove, remove_entry
from agent_runtime.executor.init.unpacking import Target, members, time_of

Kind = Literal["file", "folder", "link", "other"]

# Most bytes of the line of rules: 10,000 hidden files under the longest paths.
_RULES_BYTES = 64 * 1024 * 1024
# Most dropped paths that are told, and most characters of one: an agent can leave millions, each 4,096 long.
_TOLD = 100
_TOLD_CHARACTERS = 300
# As many links as the kernel follows.
_MOST_LINKS = 40
# Paths that are looked at to follow the agent's links: some 100,000 links of ordinary depth. The system looks at each folder
# of a path again, so one chain of links through folders 1,000 deep takes this much, and seconds.
_LINKS_BYTES = 1 << 26
_EXTENSIONS = (".so", ".pyd")
_COMPILED = (".pyc", ".pyo")
_CACHE = "__pycache__"
# Either makes a folder a Python environment; so does a Python in `bin` with its library in `lib`.
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
# What belongs to an environment that shares the carried folder itself with the agent's work.
_OF_ROOT_ENVIRONMENT = ("bin", "conda-meta", "include", "lib", "lib64", "pyvenv.cfg")

# Folders of installed packages; those below a home are imported from before the system's.
_OF_PACKAGES = ("site-packages", "dist-packages")

# Names of folders that hold nothing but tests.
_TEST_FOLDERS = ("test", "tests")
# Packages that Python asks for everywhere and has on other systems alone (Windows, Java): what stands in folders of these
# names is imported, also without an `__init__.py`.
_OF_OTHER_SYSTEMS = ("_winapi", "msvcrt", "nt", "org/python")
_IN_OTHER_SYSTEMS = re.compile(rf"(.*/)?({'|'.join(_OF_OTHER_SYSTEMS)})(/[^/]+)?")
# Modules of names that vary: pytest's plugins, and the settings that Python was built with.
_SHADOWED_PREFIXES = ("pytest_", "_sysconfigdata_")
# pytest's option that says which files it collects, in a configuration file or on a command line; and the most bytes of
# such a file that are read.
_PYTHON_FILES = re.compile(r"python_files\s*=\s*(\[[^]]*\]|[^\n]*(?:\n[ \t]+[^\n]*)*)")
_CONFIGURATIONS = (".cfg", ".ini", ".toml")
_CONFIGURATION_BYTES = 1024 * 1024

# What git takes programs from in a repository, and what a repository is known by: a linked worktree's settings lie beside
# its `objects`, without a `HEAD`.
_OF_GIT = ("config", "config.worktree", "hooks")
_OF_REPOSITORIES = (("HEAD",), ("objects", "refs"))
# Where git looks for the settings of a user whose home is the carried folder.
_OF_GIT_USERS = (".gitconfig", ".config/git")

COMPILED = "is compiled code, which Python prefers to its source"
ENVIRONMENT = "belongs to the prepared Python environment"
LOADED = "is loaded by Python, pytest or their tools by itself"
METADATA = "is package metadata, which can register pytest plugins"
SHADOWS_HIDDEN = "would be imported in place of a hidden file"
TEST = "is a test file, which pytest would run in the process of the verdict"
RUN_FIRST = "would be run before the tests beside it"
OF_TESTS = "is a module in a folder of tests, which they may import"
GIT = "holds settings or hooks of git, which run programs"
LINKED = "is what a protected link of the prepared state leads to"
LINKS_TO_HIDDEN = "links to a hidden file, or to a folder of hidden files"


def kind_of(mode: int) -> Kind:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")


def python_files(text: str) -> set[str]:
    """The patterns that pytest's `python_files` has in a configuration file or a command."""
    words = (word for value in _PYTHON_FILES.findall(text) for word in re.split(r"[\s\[\],'\"]+", value))
    return {word for word in words if "*" in word or word.endswith(".py")}


def _parents(path: str) -> Iterator[str]:
    """The folders that a relative path lies in, nearest first, without `.`."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _is_of_git(parent: int, name: str, path: str) -> bool:
    if name in _OF_GIT:
        there = set(os.listdir(parent))
        return any(there.issuperset(names) for names in _OF_REPOSITORIES)
    return any(f"/{path}".endswith(f"/{known}") for known in _OF_GIT_USERS)


def _joined(folder: str, name: str) -> str:
    return name if folder in ("", ".") else f"{folder}/{name}"


# A verifier's own PATH may name them where that of the workspace does not.
_SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class Rules:
    """What may be carried. Pure; paths are relative to the carried folder and normal, `.` is the folder itself."""

    def __init__(self, form: Message) -> None:
        self._declared = [os.path.normpath(path) for path in form["artifacts"]]
        self._names, self._modules = frozenset(form["names"]), frozenset(form["modules"])
        self._at_start = {name.removesuffix(".py") for name in self._names if name.endswith(".py")}
        self._metadata = re.compile(rf"({'|'.join(map(re.escape, form['metadata']))})(/|\Z)")
        self._seen_as = os.path.normpath(form.get("seenAs", "."))
        """The folder's path, by which its own name and those above it count."""
        self.tests = set(form["tests"]).union(*map(python_files, form["options"]))
        """Patterns of the names of files that pytest collects."""
        self.programs: Sequence[str] = ()
        """Absolute paths of the folders in which commands are looked for."""
        self.program_folders = [os.path.normpath(path) for path in form.get("programFolders", [])]
        """Those in which the verifier's commands are looked for besides, which the agent may have made."""
        self.import_roots = {os.path.normpath(path) for path in form.get("importRoots", [])}
        """Folders from which the verifier's Python imports, which the agent may have made."""
        hidden = [os.path.normpath(path) for path in form["hidden"]]
        self.hidden = set(hidden)
        self._hidden_modules = {path.removesuffix(".py") for path in hidden if path.endswith(".py")}
        self.hidden_folders = {os.path.dirname(path) or "." for path in hidden}
        """Folders of hidden files. Python imports what stands beside a test."""
        self.above_hidden = {folder for path in hidden for folder in _parents(path)} - self.hidden_folders
        self.has_tests = bool(hidden)
        """There are hidden tests, or prepared ones: found by `note_test`."""
        self._is_of_tests = not set(_TEST_FOLDERS).isdisjoint(self._seen_as.split("/"))
        self.test_folders: set[str] = set()
        """Folders of tests. Their modules are run or imported by tests; a solution does not lie there."""
        for path in hidden:
            if path.endswith(".py"):
                self.note_test(path)

    @property
    def run_first(self) -> set[str]:
        """Folders whose `__init__.py` pytest runs before the tests below it."""
        return self.hidden_folders | ({"."} if self.has_tests else set())

    def note_test(self, path: str) -> None:
        """There is a test at this path that the agent cannot change."""
        self.has_tests = True
        # Not folders of other names: the solution may be a package with tests in it.
        of_tests = [folder for folder in _parents(path) if os.path.basename(folder) in _TEST_FOLDERS]
        self.test_folders.update(["."] if self._is_of_tests else of_tests[-1:])

    def is_declared(self, path: str) -> bool:
        """It may be carried, as an artifact or in one."""
        inside = any(folder in (".", path) or path.startswith(f"{folder}/") for folder in self._declared)
        return inside or self.is_named(path)

    def leads_to_declared(self, path: str) -> bool:
        """It is a folder on the way to an artifact."""
        return any(folder.startswith(f"{path}/") for folder in self._declared)

    def is_named(self, path: str) -> bool:
        """It is declared by its own name, or by a pattern, and so carried whatever it is."""
        return any(path == name or ("*" in name and fnmatch.fnmatchcase(path, name)) for name in self._declared)

    def loaded(self, path: str, kind: Kind) -> str | None:
        """Why an entry is loaded without being asked for, wherever it stands; None when it is not."""
        if self.is_named(path):
            return None
        name, parts = os.path.basename(path), path.split("/")
        if kind != "folder" and (name in self._names or name.endswith(".pth")):
            return LOADED
        if _CACHE in parts or (kind != "folder" and name.endswith(_COMPILED)):
            return COMPILED
        if self._metadata.search(path):
            return METADATA
        if os.path.basename(self.imported_as(path, kind) or "") in self._at_start:
            return LOADED
        if kind != "folder" and self._is_test(path):
            return TEST
        if self.imported_as(path, kind) is not None and not self.test_folders.isdisjoint((".", *_parents(path))):
            return OF_TESTS
        is_before_source = name == "__init__.py" or name.endswith(_EXTENSIONS) or kind == "link"
        return SHADOWS_HIDDEN if is_before_source and self.imported_as(path, kind) in self._hidden_modules else None

    def _is_test(self, path: str) -> bool:
        """pytest collects a file of this name. A pattern for every name means every file of the folders of tests."""
        name, whole = os.path.basename(path), f"/{_joined(self._seen_as, path)}"
        found = [
            test
            for test in self.tests
            if (fnmatch.fnmatchcase(whole, f"*/{test}") if "/" in test else fnmatch.fnmatchcase(name, test))
        ]
        if not found or any(not fnmatch.fnmatchcase("any name.py", test) for test in found):
            return bool(found)
        folders = set(_parents(path))
        return (
            self._is_of_tests
            or not folders.isdisjoint(self.hidden_folders)
            or any(os.path.basename(folder) in _TEST_FOLDERS for folder in folders)
        )

    def imported_as(self, path: str, kind: Kind) -> str | None:
        """The path of the module that an entry is imported as; None for what is not imported.

        A folder is imported for its `__init__.py`; a link may lead to such a folder.
        """
        folder, _, name = path.rpartition("/")
        stem, dot, _ = name.partition(".")
        if kind == "folder" or not (name.endswith((".py", *_EXTENSIONS)) or (kind == "link" and not dot)):
            return None
        return folder or "." if stem == "__init__" else _joined(folder, stem)

    def stands_for_tests(self, module: str) -> bool:
        """A module of this path is run, or imported, as a folder that hidden files lie in or below."""
        return module in self.run_first or module in self.hidden_folders or module in self.above_hidden

    def module_name(self, module: str) -> str:
        """The last part of a module's path; `.` is imported under the folder's own name where Python looks above it."""
        return os.path.basename(self._seen_as if module == "." and ".." in self.import_roots else module)

    def is_shadowed(self, module: str) -> bool:
        """A module of this path has the name of one that the test process imports beside the code under test."""
        name = self.module_name(module)
        is_known = name in self._modules or name.startswith(_SHADOWED_PREFIXES)
        return is_known or _IN_OTHER_SYSTEMS.fullmatch(module) is not None


def leads_out(folder: str, path: str, target: str, others: Iterable[str] = ()) -> bool:
    """Whether a link at `path` in `folder` may lead out of it, and out of the other folders. All folders are absolute.

    `..` is allowed at the beginning of a relative target alone, where no other link can have come before it.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0 if target.startswith("/") else next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    there = os.path.normpath(os.path.join(folder, os.path.dirname(path), target))
    return ".." in parts[ups:] or all(below(place, there) is None for place in (folder, *others))


def below(folder: str, path: str) -> str | None:
    """The path of `path` relative to `folder`, both absolute and normal; None where it does not lie in the folder."""
    return os.path.relpath(path, folder) if os.path.commonpath([folder, path]) == folder else None


class _Prepared:
    """What the prepared folder has, before anything of the agent is in it."""

    def __init__(self, location: str, rules: Rules) -> None:
        self.kept: dict[str, str] = {}
        """Paths whose prepared version stays, with all below them, and why."""
        self.ways: set[str] = set()
        """The folders that lead to them, which stay folders."""
        self._above: dict[str, str | None] = {}
        self.modules: set[str] = set()
        """Files that would not be carried if the agent had added them."""
        self.import_roots = {"."}
        """Folders that are no packages."""
        self.links: dict[str, str] = {}
        """Links and their targets."""
        self._location, self._rules = location, rules
        known = None
        while known != (rules.tests, rules.test_folders, rules.has_tests):  # met on the way
            known = set(rules.tests), set(rules.test_folders), rules.has_tests
            self._walk()
        self.ways = {folder for path in self.kept for folder in _parents(path)}
        brought = {folder for folder in rules.above_hidden if not os.path.isdir(os.path.join(location, folder))}
        self.hidden = (rules.hidden | rules.hidden_folders | brought) - {"."}
        """Hidden files, the folders that they lie in, and the folders that exist only because of them."""

    def enters(self, path: str) -> bool:
        """Whether something in a folder may be carried."""
        return path not in self.kept and (self._rules.is_declared(path) or self._rules.leads_to_declared(path))

    def reason(self, path: str) -> str | None:
        """Why the prepared version of a path stays; None when it does not."""
        if self._rules.is_named(path):
            return None
        return self.kept.get(path) or self._reason_above(path.rpartition("/")[0])

    def stands_for(self, path: str, kind: Kind) -> str | None:
        """Why an entry must not be there: it would be imported in place of a protected file."""
        file = f"{self._rules.imported_as(path, kind)}.py"
        return SHADOWS_HIDDEN if file != path and file in self.kept and not self._rules.is_named(path) else None

    def _reason_above(self, folder: str) -> str | None:
        """Why a folder stays, or one above it. Remembered: an agent can nest folders deeply."""
        missed = []
        while folder and folder not in self._above:
            missed.append(folder)
            folder = folder.rpartition("/")[0]
        reason = self._above.get(folder)
        for below in reversed(missed):
            reason = self._above[below] = self.kept.get(below) or reason
        return reason

    def _walk(self) -> None:
        rules = self._rules
        if self._is_environment("."):
            self.kept.update({name: ENVIRONMENT for name in _OF_ROOT_ENVIRONMENT if not rules.is_named(name)})
        for parent, name, path, info in walk(_opened(self._location), "", enters=self.enters):
            kind = kind_of(info.st_mode)
            if not rules.is_declared(path):
                continue
            reason = rules.loaded(path, kind)
            if kind == "folder":
                make_readable(parent, name, info)
            if kind == "link":
                self.links[path] = os.readlink(name, dir_fd=parent)
            if reason == TEST:
                rules.note_test(path)
            if reason == LOADED and kind == "file" and name.endswith(_CONFIGURATIONS):
                rules.tests |= python_files(_read(parent, name))
            if kind in ("folder", "link") and not rules.is_named(path) and self._is_environment(path):
                reason = ENVIRONMENT
            elif kind == "folder" and not self._has(path, "__init__.py"):
                self.import_roots.add(path)
            module = rules.imported_as(path, kind)
            if reason is None and module == "." and rules.has_tests and not rules.is_named(path):
                reason = RUN_FIRST
            if reason is None and not rules.is_named(path) and _is_of_git(parent, name, path):
                reason = GIT
            if reason not in (None, COMPILED):
                self.kept[path] = reason or ""
            if module is not None and (rules.is_shadowed(module) or rules.stands_for_tests(module)):
                self.modules.add(path)
        for link in self.links:
            found = (below(self._location, place) for place in steps(self._location, link))
            way = [path for path in found if path not in (None, ".")]
            # A protected link protects nothing if the agent may change what it leads to, nor does an environment that is
            # reached through a link of the agent.
            if link in self.kept or (way and self.reason(way[-1]) == ENVIRONMENT):
                for place in way:
                    self.kept.setdefault(place, LINKED)
        self._above.clear()

    def _is_environment(self, folder: str) -> bool:
        if self._has(folder, *_OF_ENVIRONMENTS):
            return True
        if not self._has(folder, "bin/python", "bin/python3"):
            return False
        try:
            return any(name.startswith("python3") for name in os.listdir(os.path.join(self._location, folder, "lib")))
        except OSError:
            return False

    def _has(self, folder: str, *names: str) -> bool:
        return any(os.path.lexists(os.path.join(self._location, folder, name)) for name in names)


def steps(location: str, path: str, look: Callable[[str], None] = lambda path: None) -> list[str]:
    """The links on the way from `path`, below the absolute `location`, and where it leads, as absolute paths.

    Raises Refused where the way is longer than can be looked at, and what `look` raises.
    """
    found: list[str] = []
    here, left = location, list(reversed(path.split("/")))
    while left and len(found) <= _MOST_LINKS:
        part = left.pop()
        if part in ("", "."):
            continue
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        if len(os.fsencode(here)) >= PATH_BYTES:
            raise Refused(
                errno.ENAMETOOLONG, path, f"{_shown(path)} leads through links to a path of {PATH_BYTES} bytes"
            )
        look(here)
        if part != ".." and os.path.islink(here):
            found.append(here)
            target = os.readlink(here)
            here = "/" if target.startswith("/") else os.path.dirname(here)
            left += reversed(target.split("/"))
    return [os.path.normpath(place) for place in (*found, here)]


def _read(parent: int, name: str) -> str:
    """The beginning of a file of the prepared state; empty where it cannot be read."""
    try:
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | NO_WAIT, dir_fd=parent), "rb") as file:
            return file.read(_CONFIGURATION_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _opened(location: str) -> int:
    return os.open(location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def make_readable(parent: int, name: str, info: os.stat_result) -> None:
    """Let this process, where it owns a folder, walk it and change what is in it."""
    if info.st_uid == os.geteuid():
        make_writable(parent, name, info.st_mode)


class _Dropped:
    """What is not carried, and why, as the verdict tells it."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._more = 0

    def add(self, path: str, reason: str) -> None:
        """Note a reason for the verdict, if there is one to tell."""
        # Every agent that runs Python leaves compiled code behind; to tell of it would hide what was planted.
        if reason in ("", COMPILED):
            return
        if len(self._told) < _TOLD:
            self._told[path] = reason
        else:
            self._more += 1

    def report(self) -> Message:
        return {"dropped": [f"{_shown(path)} {reason}" for path, reason in self._told.items()], "more": self._more}


class _Carrying:
    """One tree on its way in."""

    def __init__(self, location: str, shown_as: str, rules: Rules, places: Sequence[str], dropped: _Dropped) -> None:
        self._location, self._shown_as, self._rules = location, shown_as, rules
        self._places, self._dropped = places, dropped
        self._prepared = _Prepared(location, rules)
        self.target = Target(location)
        self._placed: dict[str, Kind] = {}
        self._bytes_to_look_at = _LINKS_BYTES
        inside = (below(location, path) for path in rules.programs)
        self._programs = [*(path for path in inside if path is not None), *rules.program_folders]
        self._prepared_programs = {entry for folder in self._programs for entry, _ in self._entries(folder)}

    def put(self, member: tarfile.TarInfo, parts: list[str], content: IO[bytes] | None) -> None:
        """Bring one member in, if the rules let it."""
        path = "/".join(parts)
        reason = self._refusal(member, path, content)
        if reason is not None:
            self._drop(path, reason)
            return
        standing = _lstat(os.path.join(self._location, path))
        try:
            if content is not None and standing is not None and _may_be_as_it_was(member, standing):
                with open(os.path.join(self._location, path), "rb") as file:
                    compared = _Compared(file, content)
                    if not compared.is_same:
                        self.target.put(member, parts, cast("IO[bytes]", compared))
            else:
                self.target.put(member, parts, content)
        except PermissionError:
            # The agent had the same rights, so it did not change what stands here either; it may have moved it.
            stands = standing is not None and (standing.st_size == member.size or not member.isreg())
            self._drop(path, "" if stands else "cannot be written by the user of the workspace")
        kind: Kind = "folder" if member.isdir() else "link" if member.issym() else "file"
        self._placed[path] = kind
        for folder in _parents(path):
            if self._placed.get(folder) == "folder":
                break
            self._placed[folder] = "folder"

    def finish(self, roots: Sequence[_Carrying]) -> None:
        """Remove what the agent planted in any of the roots, when all of them are swept."""
        self._remove_links_to_hidden(roots)
        self._remove_planted_modules(roots)
        self._remove_planted_programs(roots)

    def _drop(self, path: str, reason: str) -> None:
        self._dropped.add(_joined(self._shown_as, path), reason)

    def _refusal(self, member: tarfile.TarInfo, path: str, content: IO[bytes] | None) -> str | None:
        """Why a member is not put in its place; empty when there is nothing to tell, None when it is."""
        rules, prepared = self._rules, self._prepared
        if not rules.is_declared(path):
            return None if member.isdir() and rules.leads_to_declared(path) else ""
        if (reason := prepared.reason(path)) is not None:
            if not _is_same(os.path.join(self._location, path), member, content):
                return reason
            if member.isreg():
                self._placed[path] = "file"  # other names of it may follow
            return ""
        if path in prepared.ways and not member.isdir():
            return "stands in place of a folder with protected files of the prepared state"
        if member.isdir():
            return COMPILED if rules.loaded(path, "folder") == COMPILED else None
        if member.issym():
            if leads_out(self._location, path, member.linkname, self._places):
                if _is_same(os.path.join(self._location, path), member, content):
                    return None
                return f"links to {_shown(member.linkname)}, outside of the working directory"
            return COMPILED if rules.loaded(path, "link") == COMPILED else None
        # A hard link to a link would be a link in another place, where it may lead out.
        if member.islnk() and self._placed.get(os.path.normpath(member.linkname)) != "file":
            return f"is a hard link to {_shown(member.linkname)}, which is not carried"
        if not (member.isreg() or member.islnk()):
            return "is no file, folder or link"
        return COMPILED if rules.loaded(path, "file") == COMPILED else None

    def sweep(self) -> None:
        """Remove what the agent deleted, and what is loaded unasked wherever it stands."""
        rules, prepared = self._rules, self._prepared
        for parent, name, path, info in walk(_opened(self._location), "", enters=prepared.enters):
            kind = kind_of(info.st_mode)
            if kind == "folder" and prepared.enters(path):
                make_readable(parent, name, info)
            # Sockets and devices are in no tar; the agent's cannot be here.
            if path in prepared.kept or path in prepared.ways or not rules.is_declared(path) or kind == "other":
                continue
            if kind == "folder" and name in _OF_PACKAGES:
                rules.import_roots.add(path)
            reason = rules.loaded(path, kind) or prepared.stands_for(path, kind)
            if reason is None and not rules.is_named(path) and _is_of_git(parent, name, path):
                reason = GIT
            if reason == COMPILED or (path in self._placed and reason is None):
                continue
            if kind == "folder" and path in self._placed and rules.leads_to_declared(path):
                continue
            if path in self._placed:
                self._drop(path, reason or "")
            elif not _may_read(parent, name, info):
                continue  # the tar has nothing that the agent may not read
            _remove(parent, name)

    def _remove_links_to_hidden(self, roots: Sequence[_Carrying]) -> None:
        """Remove links by which a hidden file would pass for the agent's work, or be overwritten with it."""
        for path in [path for path, kind in self._placed.items() if kind == "link"]:
            place = os.path.join(self._location, path)
            if not os.path.islink(place) or os.readlink(place) == self._prepared.links.get(path):
                continue
            try:
                way = steps(self._location, path, self._look)[1:]
            except Refused:
                self._plant_found(path, "leads too far")
                continue
            if any(root._is_of_hidden(there) for root in roots for there in way):
                self._plant_found(path, LINKS_TO_HIDDEN)

    def _look(self, path: str) -> None:
        self._bytes_to_look_at -= len(path)
        if self._bytes_to_look_at < 0:
            raise Refused(errno.ELOOP, ".", "the links lead through more folders than can be looked at")

    def _is_of_hidden(self, place: str) -> bool:
        """Hidden files will be there. A folder of theirs takes the place of a link as well."""
        path = below(self._location, place)
        return path in self._prepared.hidden or (path in self._rules.above_hidden and os.path.islink(place))

    def _remove_planted_modules(self, roots: Sequence[_Carrying]) -> None:
        """Remove modules that would be imported in place of others, from the folders where Python looks for modules."""
        rules, prepared = self._rules, self._prepared
        for folder in rules.run_first:
            for entry, kind in self._entries(folder):
                if rules.imported_as(entry, kind) == folder and entry not in prepared.modules:
                    self._plant_found(entry, RUN_FIRST)
        for folder in (rules.hidden_folders | rules.above_hidden) - {"."}:
            # Beside a folder without `__init__.py`, `tests.py` is what `import tests` finds.
            for entry, kind in self._entries(os.path.dirname(folder) or "."):
                if (
                    kind != "link"
                    and os.path.basename(entry) != "__init__.py"
                    and rules.imported_as(entry, kind) == folder
                    and entry not in prepared.modules
                ):
                    self._plant_found(entry, SHADOWS_HIDDEN)
        above = {folder for folder in rules.above_hidden if not self._is_package(folder)}
        first = prepared.import_roots | rules.import_roots | rules.hidden_folders | above
        left = [*first]
        while left:
            root = left.pop()
            # A link may stand for the folder now: what counts is what Python finds under the folder's name.
            for there, folder in self._found(root, roots):
                for entry, kind in there._entries(folder):
                    name = os.path.basename(entry)
                    self._judge_module(there, entry, kind, _joined(root, name))
                    if kind == "folder" and rules.is_shadowed(_joined(root, name)):
                        if root in first:  # a link may lead from such a folder to one above it
                            left += [_joined(root, known) for known in _OF_OTHER_SYSTEMS if known.split("/")[0] == name]
                        for inner, inner_kind in there._entries(entry):
                            known = _joined(root, os.path.relpath(inner, folder))
                            if rules.imported_as(inner, inner_kind) == entry:
                                self._judge_module(there, inner, inner_kind, known)

    def _found(self, folder: str, roots: Sequence[_Carrying]) -> Iterator[tuple[_Carrying, str]]:
        """Where a folder really is: the root, or roots, and its path there. What lies outside is the prepared state's."""
        place = os.path.realpath(os.path.join(self._location, folder))
        for root in (self,) if below(self._location, place) is not None else roots:
            if (path := below(root._location, place)) is not None:
                yield root, path

    def _remove_planted_programs(self, roots: Sequence[_Carrying]) -> None:
        """Remove what the agent put before a program of the system where commands are looked for."""
        given = [path for path in self._rules.programs if below(self._location, path) is None]
        others = [*given, *_SYSTEM_PROGRAMS]
        # As with modules, a link may stand for the folder now.
        folders = [found for path in self._programs for found in self._found(path, roots)]
        for there, folder in dict.fromkeys(folders):
            for entry, _ in there._entries(folder):
                name = os.path.basename(entry)
                if entry not in there._prepared_programs and any(
                    os.path.lexists(os.path.join(other, name)) for other in others
                ):
                    there._plant_found(entry, f"would be run in place of {name}")

    def _judge_module(self, there: _Carrying, path: str, kind: Kind, known_as: str) -> None:
        module = self._rules.imported_as(known_as, kind)
        if module is None or not self._rules.is_shadowed(module) or known_as in self._prepared.modules:
            return
        there._plant_found(path, f"would be imported in place of {self._rules.module_name(module)}")

    def _plant_found(self, path: str, reason: str) -> None:
        if self._prepared.reason(path) is not None or self._rules.is_named(path) or not self._rules.is_declared(path):
            return  # nothing of the agent can be there, or the task names it
        folder = _opened(os.path.join(self._location, os.path.dirname(path)))
        try:
            _remove(folder, os.path.basename(path))
        finally:
            os.close(folder)
        self._drop(path, reason)

    def _is_package(self, folder: str) -> bool:
        return os.path.exists(os.path.join(self._location, folder, "__init__.py"))

    def _entries(self, folder: str) -> list[tuple[str, Kind]]:
        """(path, kind) of what is in a folder; nothing where a link is on the way, or no folder."""
        here = os.dup(self.target.root)
        try:
            for part in folder.split("/"):
                above, here = here, open_folder(here, part)
                os.close(above)
            return [
                (_joined(folder, entry.name), kind_of(entry.stat(follow_symlinks=False).st_mode))
                for entry in os.scandir(here)
            ]
        except OSError:
            return []
        finally:
            os.close(here)


def _shown(path: str) -> str:
    """A path as a verdict shows it: of bounded length, and plain text whatever bytes it has."""
    path = path[:_TOLD_CHARACTERS]
    return path if path.isprintable() else ascii(path)


def _remove(parent: int, name: str) -> None:
    """Remove an entry, where this process may: what it may not remove, the agent, the same user, did not make."""
    try:
        remove_entry(parent, name, missing_ok=True)
    except PermissionError:
        return


def _lstat(place: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.lstat(place)
    return None


def _may_be_as_it_was(member: tarfile.TarInfo, standing: os.stat_result) -> bool:
    """It is another user's file, of the same size and time: it stays that user's if its content is the same.

    The agent may have moved another file there. All files of an image layer may have one time: it is in seconds.
    """
    known = (member.isreg(), member.uid, member.size, time_of(member))
    found = (stat.S_ISREG(standing.st_mode), standing.st_uid, standing.st_size, standing.st_mtime_ns)
    return standing.st_uid != os.geteuid() and known == found


class _Compared:
    """A member's content that is compared with a file of the same size first, and can then be read from its beginning."""

    def __init__(self, standing: IO[bytes], content: IO[bytes]) -> None:
        self._standing, self._content = standing, content
        self._same = 0
        self._block = content.read(COPY_BYTES)
        while self._block and standing.read(len(self._block)) == self._block:
            self._same += len(self._block)
            self._block = content.read(COPY_BYTES)
        self.is_same = not self._block
        standing.seek(0)

    def read(self, size: int) -> bytes:
        if self._same:
            block = self._standing.read(min(size, self._same))
            self._same -= len(block)
        else:
            block, self._block = self._block or self._content.read(size), b""
        return block


def _is_same(standing: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> bool:
    """Whether a member is what stands there already."""
    try:
        info = os.lstat(standing)
        if member.issym():
            return stat.S_ISLNK(info.st_mode) and os.readlink(standing) == member.linkname
        if content is None or not stat.S_ISREG(info.st_mode):
            # What a hard link has in it was told of its first name.
            return stat.S_ISDIR(info.st_mode) if member.isdir() else member.islnk() and stat.S_ISREG(info.st_mode)
        with open(standing, "rb") as file:
            return info.st_size == member.size and _Compared(file, content).is_same
    except OSError:
        return False


def _may_read(parent: int, name: str, info: os.stat_result) -> bool:
    """Whether the workspace's user may read an entry, with its own rights alone."""
    if stat.S_ISLNK(info.st_mode) or info.st_uid == os.getuid():
        return True
    # The kernel asks for the real user here, and for none of this process's capabilities.
    return os.access(name, os.R_OK | (os.X_OK if stat.S_ISDIR(info.st_mode) else 0), dir_fd=parent)


def carry(location: str, stream: int, searched: Sequence[str] = (), programs: Sequence[str] = ()) -> Message:
    """Bring a line of rules and the tar that follows it into folders below `location`, an absolute path.

    The line is a list: the rules for each `root`, a file or folder below `location`. `searched` are the absolute paths from
    which Python imports in this workspace, `programs` those of its `PATH`. Returns `dropped`, what of the agent's was left
    out and why, and `more`, how many are not listed. Raises Refused.
    """
    with open(stream, "rb", closefd=False) as file:
        line = file.readline(_RULES_BYTES)
        try:
            forms = {os.path.normpath(form["root"]): form for form in json.loads(line)}
            for form in forms.values():
                Rules(form)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Refused(
                errno.EINVAL, "carry", "the body does not begin with a line of rules; see docs/executor.md"
            ) from None
        roots = [os.path.normpath(os.path.join(location, root)) for root in forms]
        places, dropped, begun = [*roots, *map(os.path.realpath, roots)], _Dropped(), list[_Carrying]()

        def begin(root: str, *, is_folder: bool) -> tuple[_Carrying, list[str]]:
            """The carrying into a root, and the path of the root itself in it."""
            place, form, path = os.path.realpath(os.path.join(location, root)), forms[root], list[str]()
            if not is_folder:
                # A file is carried into the folder that it lies in, under its name alone.
                root, (place, name) = os.path.dirname(root), os.path.split(place)
                form = {**form, "artifacts": [name], "hidden": [], "importRoots": [], "programFolders": []}
                path = [name]
            elif not os.path.isdir(place):
                remove(place)
            os.makedirs(place, exist_ok=True)
            rules = Rules(form)
            rules.programs = programs
            rules.import_roots.update(path for path in (below(place, path) for path in searched) if path is not None)
            if os.path.dirname(place) in searched:
                rules.import_roots.add("..")
            begun.append(_Carrying(place, root, rules, places, dropped))
            return begun[-1], path

        left = set(forms)
        entries = ((root, *entry) for entry in members(file) for root in forms if _lies_in("/".join(entry[1]), root))
        for root, group in itertools.groupby(entries, lambda entry: entry[0]):
            if root not in left:
                raise Refused(errno.EINVAL, root, f"the tar's entries of {_shown(root)} do not follow one another")
            left.remove(root)
            carrying, path = None, list[str]()
            for _, member, parts, content in group:
                inside = parts if root == "." else parts[root.count("/") + 1 :]
                if carrying is None:
                    carrying, path = begin(root, is_folder=root == "." or bool(inside) or member.isdir())
                if member.islnk():
                    linked = os.path.normpath(member.linkname).removeprefix(f"{root}/")
                    member.linkname = "/".join([*path, linked]) if path else linked
                if path or inside:
                    carrying.put(member, [*path, *inside], content)
            begun[-1].sweep()
        for root in left:  # of these the agent left nothing
            place = os.path.join(location, root)
            if os.path.lexists(place):
                begin(root, is_folder=os.path.isdir(place))[0].sweep()
        for carrying in begun:
            carrying.finish(begun)
        for carrying in begun:
            carrying.target.finish()
        return dropped.report()


def _lies_in(path: str, root: str) -> bool:
    return root == "." or path == root or path.startswith(f"{root}/")

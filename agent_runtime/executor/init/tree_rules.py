"""Rules for the agent's files that would let it decide its own verdict; docs/verification.md has the table.

The executor applies these rules to the tar of an agent's tree (`carrying.py`). In the sandbox of a repository task,
`apply_patch.py` applies them to a patch. So this file uses only the standard library, in the syntax of Python 3.5.
"""
# ruff: noqa: UP031

import errno
import fnmatch
import os
import re
import stat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Literal

    Kind = Literal["file", "folder", "link", "other"]

# The kernel's limit for a path.
PATH_BYTES = 4096
# Limit of a path's characters in a verdict: an agent can leave millions of paths of 4,096 characters.
_SHOWN_CHARACTERS = 300
# The kernel's limit of followed links.
_MOST_LINKS = 40
# Limit of the bytes of paths that are checked when the agent's links are followed: about 100,000 links of ordinary
# depth. Each folder of a path is checked again, so one chain of links through 1,000 nested folders reaches the limit,
# after seconds.
_LINKS_BYTES = 1 << 26
_EXTENSIONS = (".so", ".pyd")
COMPILED_SUFFIXES = (".pyc", ".pyo")
CACHE_FOLDER = "__pycache__"
# A folder with one of these is a Python environment. So is one with a Python in `bin` and its library in `lib`.
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
# Entries of an environment whose root is the carried folder itself.
_OF_ROOT_ENVIRONMENT = ("bin", "conda-meta", "include", "lib", "lib64", "pyvenv.cfg")

# Folders of installed packages. Python searches those below a home folder before the system's.
OF_PACKAGES = ("site-packages", "dist-packages")

# Names of folders that contain only tests.
_TEST_FOLDERS = ("test", "tests")
# Packages that Python tries everywhere but has only on other systems (Windows, Java). Modules in folders with these
# names are imported, even without an `__init__.py`.
_OF_OTHER_SYSTEMS = ("_winapi", "msvcrt", "nt", "org/python")
_IN_OTHER_SYSTEMS = re.compile(r"(.*/)?(%s)(/[^/]+)?" % "|".join(_OF_OTHER_SYSTEMS))
# Prefixes of modules whose full names vary: pytest's plugins, and Python's build settings.
_SHADOWED_PREFIXES = ("pytest_", "_sysconfigdata_")
# pytest's option for the files that it collects, in a configuration file or on a command line.
_PYTHON_FILES = re.compile(r"python_files\s*=\s*(\[[^]]*\]|[^\n]*(?:\n[ \t]+[^\n]*)*)")
_CONFIGURATIONS = (".cfg", ".ini", ".toml")
_CONFIGURATION_BYTES = 1024 * 1024

# Files of a repository from which git runs programs, and files that identify a repository. A linked worktree's settings
# are next to its `objects`, without a `HEAD`.
_OF_GIT = ("config", "config.worktree", "hooks")
_OF_REPOSITORIES = (("HEAD",), ("objects", "refs"))
# Git's settings files of a user whose home is the carried folder.
_OF_GIT_USERS = (".gitconfig", ".config/git")

COMPILED = "is compiled code, which Python prefers to its source"
ENVIRONMENT = "belongs to the prepared Python environment"
LOADED = "is loaded automatically by Python, pytest or their tools"
METADATA = "is package metadata, which can register pytest plugins"
SHADOWS_HIDDEN = "would be imported in place of a hidden file"
TEST = "is a test file, which pytest would run in the verifier's process"
RUN_FIRST = "would be run before the tests in its folder"
OF_TESTS = "is a module in a folder of tests, which they may import"
GIT = "holds settings or hooks of git, which run programs"
LINKED = "is the target of a protected link of the prepared state"
LEADS_OUT = "links to %s, outside of the working directory"
IN_PLACE_OF_FOLDER = "replaces a folder with protected files of the prepared state"
LINKS_TO_HIDDEN = "links to a hidden file, or to a folder of hidden files"


def kind_in(folder: int, name: str) -> "Kind":
    """Return the type of an entry of an open folder."""
    return kind_of(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def kind_of(mode: int) -> "Kind":
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}  # type: dict[int, Kind]
    return kinds.get(stat.S_IFMT(mode), "other")


def python_files(text: str) -> "set[str]":
    """Return the patterns of pytest's `python_files` in a configuration file or a command."""
    words = (word for value in _PYTHON_FILES.findall(text) for word in re.split(r"[\s\[\],'\"]+", value))
    return {word for word in words if "*" in word or word.endswith(".py")}


def parents(path: str) -> "Iterator[str]":
    """Return the folders that contain a relative path, nearest first, without `.`."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def joined(folder: str, name: str) -> str:
    return name if folder in ("", ".") else folder + "/" + name


# A verifier's PATH may contain them even if the workspace's PATH does not.
_SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class Rules:
    """Rules for what may be carried. Without I/O. Paths are normalised and relative to the carried folder; `.` is the
    folder itself.
    """

    def __init__(self, form: "Mapping[str, Any]") -> None:
        self._declared = [os.path.normpath(path) for path in form["artifacts"]]
        self._names, self._modules = frozenset(form["names"]), frozenset(form["modules"])
        self._at_start = {name[:-3] for name in self._names if name.endswith(".py")}
        self._metadata = re.compile(r"(%s)(/|\Z)" % "|".join(map(re.escape, form["metadata"])))
        self._seen_as = os.path.normpath(form.get("seenAs", "."))
        """The folder's path in the task. Rules for folder names also apply to its name and its parents' names."""
        self.tests = set(form["tests"]).union(*map(python_files, form["options"]))
        """Patterns of file names that pytest collects."""
        self.programs = ()  # type: Sequence[str]
        """Absolute paths of the folders in which commands are looked up."""
        self.program_folders = [os.path.normpath(path) for path in form.get("programFolders", [])]
        """Further folders in which the verifier's commands are looked up, which the agent may have created."""
        self.import_roots = {os.path.normpath(path) for path in form.get("importRoots", [])}
        """Folders from which the verifier's Python imports, which the agent may have created."""
        hidden = [os.path.normpath(path) for path in form["hidden"]]
        self.hidden = set(hidden)
        self._hidden_modules = {path[:-3] for path in hidden if path.endswith(".py")}
        self.hidden_folders = {os.path.dirname(path) or "." for path in hidden}
        """Folders of hidden files, from which Python imports modules when it runs a test there."""
        self.above_hidden = {folder for path in hidden for folder in parents(path)} - self.hidden_folders
        self.has_tests = bool(hidden)
        """Whether there are hidden or prepared tests, as found by `note_test`."""
        self._is_of_tests = not set(_TEST_FOLDERS).isdisjoint(self._seen_as.split("/"))
        self.test_folders = set()  # type: set[str]
        """Folders of tests. Tests run or import their modules; a solution does not belong there."""
        for path in hidden:
            if path.endswith(".py"):
                self.note_test(path)

    @property
    def run_first(self) -> "set[str]":
        """Return folders whose `__init__.py` pytest runs before the tests below it."""
        return self.hidden_folders | ({"."} if self.has_tests else set())

    def note_test(self, path: str) -> None:
        """Record a test at this path that the agent cannot change."""
        self.has_tests = True
        # Only folders with these names: the solution may be a package that contains tests.
        of_tests = [folder for folder in parents(path) if os.path.basename(folder) in _TEST_FOLDERS]
        self.test_folders.update(["."] if self._is_of_tests else of_tests[-1:])

    def is_declared(self, path: str) -> bool:
        """Whether a path is an artifact or inside one."""
        inside = any(folder in (".", path) or path.startswith(folder + "/") for folder in self._declared)
        return inside or self.is_named(path)

    def leads_to_declared(self, path: str) -> bool:
        """Whether a folder contains an artifact."""
        return any(folder.startswith(path + "/") for folder in self._declared)

    def is_named(self, path: str) -> bool:
        """Whether the path is declared by its own name or by a pattern, and therefore always carried."""
        return any(path == name or ("*" in name and fnmatch.fnmatchcase(path, name)) for name in self._declared)

    def loaded(self, path: str, kind: "Kind") -> "str | None":
        """Return why an entry is loaded automatically, wherever it is; None if it is not."""
        if self.is_named(path):
            return None
        name, parts = os.path.basename(path), path.split("/")
        if kind != "folder" and (name in self._names or name.endswith(".pth")):
            return LOADED
        if CACHE_FOLDER in parts or (kind != "folder" and name.endswith(COMPILED_SUFFIXES)):
            return COMPILED
        if self._metadata.search(path):
            return METADATA
        if os.path.basename(self.imported_as(path, kind) or "") in self._at_start:
            return LOADED
        if kind != "folder" and self._is_test(path):
            return TEST
        if self.imported_as(path, kind) is not None and not self.test_folders.isdisjoint((".", *parents(path))):
            return OF_TESTS
        is_before_source = name == "__init__.py" or name.endswith(_EXTENSIONS) or kind == "link"
        return SHADOWS_HIDDEN if is_before_source and self.imported_as(path, kind) in self._hidden_modules else None

    def of_git(self, path: str, parent: int) -> "str | None":
        """Return why git would run programs for an entry of the open folder `parent`; None if it would not."""
        if os.path.basename(path) in _OF_GIT:
            there = set(os.listdir(parent))
            is_of_git = any(there.issuperset(names) for names in _OF_REPOSITORIES)
        else:
            is_of_git = any(("/" + path).endswith("/" + known) for known in _OF_GIT_USERS)
        return GIT if is_of_git and not self.is_named(path) else None

    def _is_test(self, path: str) -> bool:
        """Whether pytest collects a file with this name. A pattern that matches every name counts only in test folders."""
        name, whole = os.path.basename(path), "/" + joined(self._seen_as, path)
        found = [
            test
            for test in self.tests
            if (fnmatch.fnmatchcase(whole, "*/" + test) if "/" in test else fnmatch.fnmatchcase(name, test))
        ]
        if not found or any(not fnmatch.fnmatchcase("any name.py", test) for test in found):
            return bool(found)
        folders = set(parents(path))
        return (
            self._is_of_tests
            or not folders.isdisjoint(self.hidden_folders)
            or any(os.path.basename(folder) in _TEST_FOLDERS for folder in folders)
        )

    def imported_as(self, path: str, kind: "Kind") -> "str | None":
        """Return the path of the module as which an entry is imported; None if it is not imported.

        A folder is imported for its `__init__.py`; a link may point to such a folder.
        """
        folder, _, name = path.rpartition("/")
        stem, dot, _ = name.partition(".")
        if kind == "folder" or not (name.endswith((".py", *_EXTENSIONS)) or (kind == "link" and not dot)):
            return None
        return folder or "." if stem == "__init__" else joined(folder, stem)

    def replaces_tests(self, module: str) -> bool:
        """Whether a module with this path is run, or imported, instead of a folder that contains hidden files."""
        return module in self.run_first or module in self.hidden_folders or module in self.above_hidden

    def module_name(self, module: str) -> str:
        """Return the last part of a module's path; `.` is imported under the folder's own name if Python searches its
        parent.
        """
        return os.path.basename(self._seen_as if module == "." and ".." in self.import_roots else module)

    def is_shadowed(self, module: str) -> bool:
        """Whether a module with this path has the name of one that the test process imports besides the code under
        test.
        """
        name = self.module_name(module)
        is_known = name in self._modules or name.startswith(_SHADOWED_PREFIXES)
        return is_known or _IN_OTHER_SYSTEMS.fullmatch(module) is not None


def leads_out(folder: str, path: str, target: str, others: "Iterable[str]" = ()) -> bool:
    """Whether a link at `path` in `folder` may lead out of it, and out of the other folders. All folders are absolute.

    `..` is allowed only at the beginning of a relative target, where no other link can precede it.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0 if target.startswith("/") else next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    there = os.path.normpath(os.path.join(folder, os.path.dirname(path), target))
    return ".." in parts[ups:] or all(below(place, there) is None for place in (folder, *others))


def below(folder: str, path: str) -> "str | None":
    """Return `path` relative to `folder`, both absolute and normalised; None if it is not inside the folder."""
    return os.path.relpath(path, folder) if os.path.commonpath([folder, path]) == folder else None


class Prepared:
    """Contents of the prepared folder before the agent's files are added."""

    def __init__(self, tree: "Tree") -> None:
        self.kept = {}  # type: dict[str, str]
        """Paths whose prepared version is kept, with everything below them, and why."""
        self.ways = set()  # type: set[str]
        """Folders that contain kept paths and remain folders."""
        self._above = {}  # type: dict[str, str | None]
        self.modules = set()  # type: set[str]
        """Files that would not be carried if the agent had added them."""
        self.import_roots = {"."}
        """Folders that are not packages."""
        self.links = {}  # type: dict[str, str]
        """Links and their targets."""
        self.location, self.rules, self._tree = tree.location, tree.rules, tree
        location, rules, known = tree.location, tree.rules, None
        while known != (rules.tests, rules.test_folders, rules.has_tests):  # repeat until a walk finds no further tests
            known = set(rules.tests), set(rules.test_folders), rules.has_tests
            self._walk()
        self.ways = {folder for path in self.kept for folder in parents(path)}
        brought = {folder for folder in rules.above_hidden if not os.path.isdir(os.path.join(location, folder))}
        self.hidden = (rules.hidden | rules.hidden_folders | brought) - {"."}
        """Hidden files, their folders, and folders that exist only because of them."""

    def enters(self, path: str) -> bool:
        """Whether something in a folder may be carried."""
        return path not in self.kept and (self.rules.is_declared(path) or self.rules.leads_to_declared(path))

    def reason(self, path: str) -> "str | None":
        """Return why the prepared version of a path is kept; None if it is not."""
        if self.rules.is_named(path):
            return None
        return self.kept.get(path) or self._reason_above(path.rpartition("/")[0])

    def why_it_shadows(self, path: str, kind: "Kind") -> "str | None":
        """Return a reason if the entry would be imported instead of a protected file; None if not."""
        file = "%s.py" % self.rules.imported_as(path, kind)
        return SHADOWS_HIDDEN if file != path and file in self.kept and not self.rules.is_named(path) else None

    def _reason_above(self, folder: str) -> "str | None":
        """Return why a folder or a parent of it is kept. Cached, because an agent can nest folders deeply."""
        missed = []
        while folder and folder not in self._above:
            missed.append(folder)
            folder = folder.rpartition("/")[0]
        reason = self._above.get(folder)
        for below in reversed(missed):
            reason = self._above[below] = self.kept.get(below) or reason
        return reason

    def _walk(self) -> None:
        rules = self.rules
        if self._is_environment("."):
            self.kept.update({name: ENVIRONMENT for name in _OF_ROOT_ENVIRONMENT if not rules.is_named(name)})
        for parent, name, path, kind in self._tree.walk(self.enters):
            if not rules.is_declared(path):
                continue
            reason = rules.loaded(path, kind)
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
            reason = reason or self.rules.of_git(path, parent)
            if reason not in (None, COMPILED):
                self.kept[path] = reason or ""
            if module is not None and (rules.is_shadowed(module) or rules.replaces_tests(module)):
                self.modules.add(path)
        for link in self.links:
            found = (below(self.location, place) for place in followed_links(self.location, link))
            way = [path for path in found if path not in (None, ".")]
            # A protected link is useless if the agent may change its target. So is an environment that is reached
            # through a link of the agent.
            is_protected = link in self.kept and (self._tree.protects_test_link_targets or self.kept[link] != OF_TESTS)
            if is_protected or (way and self.reason(way[-1]) == ENVIRONMENT):
                for place in way:
                    self.kept.setdefault(place, LINKED)
        self._above.clear()

    def _is_environment(self, folder: str) -> bool:
        if self._has(folder, *_OF_ENVIRONMENTS):
            return True
        if not self._has(folder, "bin/python", "bin/python3"):
            return False
        try:
            return any(name.startswith("python3") for name in os.listdir(os.path.join(self.location, folder, "lib")))
        except OSError:
            return False

    def _has(self, folder: str, *names: str) -> bool:
        return any(os.path.lexists(os.path.join(self.location, folder, name)) for name in names)


def followed_links(location: str, path: str, look: "Callable[[str], None]" = lambda path: None) -> "list[str]":
    """Return the links that are followed to resolve `path`, relative to the absolute `location`, and then the final
    target, all as absolute paths. Raises OSError if a path is too long or there are too many links, and errors of
    `look`, which is called for each path.
    """
    found = []  # type: list[str]
    here, left = location, list(reversed(path.split("/")))
    while left and len(found) <= _MOST_LINKS:
        part = left.pop()
        if part in ("", "."):
            continue
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        if len(os.fsencode(here)) >= PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, "links lead to a path of %d bytes or more" % PATH_BYTES, shown(path))
        look(here)
        if part != ".." and os.path.islink(here):
            found.append(here)
            target = os.readlink(here)
            here = "/" if target.startswith("/") else os.path.dirname(here)
            left += reversed(target.split("/"))
    return [os.path.normpath(place) for place in (*found, here)]


def _read(parent: int, name: str) -> str:
    """Return the beginning of a file of the prepared state; empty if it cannot be read."""
    try:
        with open(
            os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=parent), "rb"
        ) as file:
            return file.read(_CONFIGURATION_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Tree:
    """A folder that receives an agent's work. It must be constructed before the agent's files are added."""

    protects_test_link_targets = True
    """Whether targets of links in test folders are protected too."""

    def __init__(self, location: str, rules: Rules) -> None:
        self.location, self.rules = location, rules
        self.placed = {}  # type: dict[str, Kind]
        """Entries that came from the agent."""
        self.prepared = Prepared(self)
        self._bytes_to_look_at = _LINKS_BYTES
        inside = (below(location, path) for path in rules.programs)
        self._programs = [*(path for path in inside if path is not None), *rules.program_folders]
        self.prepared_programs = {entry for folder in self._programs for entry, _ in self._entries(folder)}

    def walk(self, enters: "Callable[[str], bool]") -> "Iterator[tuple[int, str, str, Kind]]":
        """Yield (parent descriptor, name, path, kind) of all entries; `enters` decides, for a folder after it was
        yielded, whether to walk it.
        """
        raise NotImplementedError

    def remove(self, path: str, reason: str) -> None:
        """Restore an entry's prepared version, or remove it."""
        raise NotImplementedError

    def reason(self, parent: int, path: str, kind: "Kind") -> "str | None":
        """Return why an entry must not come from the agent, wherever it is; None if it may."""
        reason = self.rules.loaded(path, kind) or self.prepared.why_it_shadows(path, kind)
        return reason or self.rules.of_git(path, parent)

    def remove_planted(self, roots: "Sequence[Tree]") -> None:
        """Remove what the agent planted in any of the roots. Call it when all roots are complete."""
        self._remove_links_to_hidden(roots)
        self._remove_planted_modules(roots)
        self._remove_planted_programs(roots)

    def remove_unless_named(self, path: str, reason: str) -> None:
        """Remove an entry that may be the agent's, unless the task names it."""
        may_be_planted = self.rules.is_declared(path) and not self.rules.is_named(path)
        if may_be_planted and self.prepared.reason(path) is None:
            self.remove(path, reason)

    def _remove_links_to_hidden(self, roots: "Sequence[Tree]") -> None:
        """Remove links of the agent through which a hidden file would count as the agent's work, or be overwritten."""
        for path in [path for path, kind in self.placed.items() if kind == "link"]:
            place = os.path.join(self.location, path)
            if not os.path.islink(place) or os.readlink(place) == self.prepared.links.get(path):
                continue
            try:
                way = followed_links(self.location, path, self._look)[1:]
            except OSError:
                self.remove_unless_named(path, "links through too many links or folders")
                continue
            if any(root._is_of_hidden(there) for root in roots for there in way):
                self.remove_unless_named(path, LINKS_TO_HIDDEN)

    def _look(self, path: str) -> None:
        self._bytes_to_look_at -= len(path)
        if self._bytes_to_look_at < 0:
            raise OSError(errno.ELOOP, "the links lead through too many folders")

    def _is_of_hidden(self, place: str) -> bool:
        """Whether hidden files will be placed at this path. A folder of hidden files also replaces a link."""
        path = below(self.location, place)
        return path in self.prepared.hidden or (path in self.rules.above_hidden and os.path.islink(place))

    def _remove_planted_modules(self, roots: "Sequence[Tree]") -> None:
        """Remove modules that would be imported instead of others, from the folders where Python looks for modules."""
        rules, prepared = self.rules, self.prepared
        for folder in rules.run_first:
            for entry, kind in self._entries(folder):
                if rules.imported_as(entry, kind) == folder and entry not in prepared.modules:
                    self.remove_unless_named(entry, RUN_FIRST)
        for folder in (rules.hidden_folders | rules.above_hidden) - {"."}:
            # Next to a folder without `__init__.py`, `import tests` finds `tests.py`.
            for entry, kind in self._entries(os.path.dirname(folder) or "."):
                if (
                    entry != folder  # a link there is replaced by the folder of hidden files
                    and os.path.basename(entry) != "__init__.py"
                    and rules.imported_as(entry, kind) == folder
                    and entry not in prepared.modules
                ):
                    self.remove_unless_named(entry, SHADOWS_HIDDEN)
        above = {folder for folder in rules.above_hidden if not self._is_package(folder)}
        first = prepared.import_roots | rules.import_roots | rules.hidden_folders | above
        left = [*first]
        while left:
            root = left.pop()
            # The folder may be a link now, so check the folder that Python finds under this name.
            for there, folder in self._found(root, roots):
                for entry, kind in there._entries(folder):
                    name = os.path.basename(entry)
                    self._judge_module(there, entry, kind, joined(root, name))
                    if kind == "folder" and rules.is_shadowed(joined(root, name)):
                        if root in first:  # a link may lead from such a folder to one above it
                            left += [joined(root, known) for known in _OF_OTHER_SYSTEMS if known.split("/")[0] == name]
                        for inner, inner_kind in there._entries(entry):
                            known = joined(root, os.path.relpath(inner, folder))
                            if rules.imported_as(inner, inner_kind) == entry:
                                self._judge_module(there, inner, inner_kind, known)

    def _found(self, folder: str, roots: "Sequence[Tree]") -> "Iterator[tuple[Tree, str]]":
        """Yield (root, path in it) for the real location of a folder. Folders outside of all roots belong to the
        prepared state.
        """
        place = os.path.realpath(os.path.join(self.location, folder))
        for root in (self,) if below(self.location, place) is not None else roots:
            path = below(root.location, place)
            if path is not None:
                yield root, path

    def _remove_planted_programs(self, roots: "Sequence[Tree]") -> None:
        """Remove programs of the agent that would be found before a program of the system."""
        given = [path for path in self.rules.programs if below(self.location, path) is None]
        others = [*given, *_SYSTEM_PROGRAMS]
        # The folder may be a link now.
        folders = [found for path in self._programs for found in self._found(path, roots)]
        for there, folder in dict.fromkeys(folders):
            for entry, _ in there._entries(folder):
                name = os.path.basename(entry)
                if entry not in there.prepared_programs and any(
                    os.path.lexists(os.path.join(other, name)) for other in others
                ):
                    there.remove_unless_named(entry, "would be run in place of " + name)

    def _judge_module(self, there: "Tree", path: str, kind: "Kind", known_as: str) -> None:
        module = self.rules.imported_as(known_as, kind)
        if module is None or not self.rules.is_shadowed(module) or known_as in self.prepared.modules:
            return
        there.remove_unless_named(path, "would be imported in place of " + self.rules.module_name(module))

    def _is_package(self, folder: str) -> bool:
        return os.path.exists(os.path.join(self.location, folder, "__init__.py"))

    def _entries(self, folder: str) -> "list[tuple[str, Kind]]":
        """Return (path, kind) of a folder's entries; nothing if the path contains a link or is not a folder."""
        here = os.open(self.location, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folder.split("/"):
                above, here = here, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(above)
            return [(joined(folder, name), kind_in(here, name)) for name in os.listdir(here)]
        except OSError:
            return []
        finally:
            os.close(here)


def shown(path: str) -> str:
    """Return a path for a verdict, shortened and escaped if it is not printable."""
    path = path[:_SHOWN_CHARACTERS]
    return path if path.isprintable() else ascii(path)

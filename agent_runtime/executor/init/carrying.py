"""Unpack the tar of an agent's tree into a prepared folder, without files that would let the agent decide its own
verdict.

docs/verification.md has the steps, and the table of dropped files. A tar may have several roots: files and folders of
the agent that are unpacked one by one. Afterwards, files that the agent planted where modules and commands are searched
are removed; this comes last because a link of one root may lead into another. Until then no link is followed, so a file
is written exactly at its name in the tar. No process of the agent runs during this time.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import json
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, cast

from agent_runtime.executor.init.archives import COPY_BYTES, SECOND, walk
from agent_runtime.executor.init.changes import Changes
from agent_runtime.executor.init.channel import Message
from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.tree_rules import (
    CACHE_FOLDER,
    COMPILED,
    COMPILED_SUFFIXES,
    IN_PLACE_OF_FOLDER,
    LEADS_OUT,
    OF_PACKAGES,
    Rules,
    Tree,
    below,
    joined,
    kind_of,
    leads_out,
    parents,
    shown,
)
from agent_runtime.executor.init.trees import make_writable, remove, remove_entry
from agent_runtime.executor.init.unpacking import Target, members, time_of

if TYPE_CHECKING:
    from agent_runtime.executor.init.tree_rules import Kind

# Limit of the line of rules: enough for 10,000 hidden files with the longest paths.
_RULES_BYTES = 64 * 1024 * 1024
# The report lists at most this many dropped paths.
_MAX_REPORTED = 100
# Nanoseconds between two times: programs that read times as floating-point numbers distinguish them, and thousands of
# files are not in the future when the verifier starts.
_TIME_STEP = 1000


class _Dropped:
    """Files that are not carried, with the reasons for the verdict."""

    def __init__(self) -> None:
        self._reported: dict[str, str] = {}
        self._more = 0

    def add(self, path: str, reason: str) -> None:
        """Record a reason for the verdict, if there is one."""
        # Every agent that runs Python leaves compiled code. Reporting it would push planted files out of the list.
        if reason in ("", COMPILED):
            return
        if len(self._reported) < _MAX_REPORTED:
            self._reported[path] = reason
        else:
            self._more += 1

    def report(self) -> Message:
        return {"dropped": [f"{shown(path)} {reason}" for path, reason in self._reported.items()], "more": self._more}


class _Carrying(Tree):
    """One tree that is being carried."""

    def __init__(
        self,
        location: str,
        shown_as: str,
        rules: Rules,
        places: Sequence[str],
        dropped: _Dropped,
        changes: Changes,
        since: float | None = None,
    ) -> None:
        super().__init__(location, rules)
        self._shown_as, self._places, self._dropped, self._changes = shown_as, places, dropped, changes
        self._since = float("inf") if since is None else since * SECOND
        self.target = Target(location)
        self.written: list[tuple[int, str]] = []
        """Times and paths of the files that the agent wrote since its start."""

    def walk(self, enters: Callable[[str], bool]) -> Iterator[tuple[int, str, str, Kind]]:
        for parent, name, path, info in walk(os.open(self.location, os.O_RDONLY | os.O_DIRECTORY), "", enters=enters):
            # Files of this process's user can be read, and their content changed.
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and enters(path):
                make_writable(parent, name, info.st_mode)
            yield parent, name, path, kind_of(info.st_mode)

    def put(self, member: tarfile.TarInfo, parts: list[str], content: IO[bytes] | None) -> None:
        """Write one member if the rules allow it."""
        path = "/".join(parts)
        reason = self._refusal(member, path, content)
        if reason is not None:
            self._drop(path, reason)
            return
        existing = _lstat(os.path.join(self.location, path))
        try:
            if content is not None and existing is not None and _may_be_unchanged(member, existing):
                with open(os.path.join(self.location, path), "rb") as file:
                    compared = _Compared(file, content)
                    if not compared.is_same:
                        self._write(member, path, cast("IO[bytes]", compared), existing)
            else:
                self._write(member, path, content, existing)
        except PermissionError:
            # The agent had the same rights, so it cannot have changed this entry; but it may have moved it.
            is_unchanged = existing is not None and (existing.st_size == member.size or not member.isreg())
            self._drop(path, "" if is_unchanged else "cannot be written by the user of the workspace")
        kind: Kind = "folder" if member.isdir() else "link" if member.issym() else "file"
        self.placed[path] = kind
        for folder in parents(path):
            if self.placed.get(folder) == "folder":
                break
            self.placed[folder] = "folder"

    def _write(
        self, member: tarfile.TarInfo, path: str, content: IO[bytes] | None, existing: os.stat_result | None
    ) -> None:
        parts = [part for part in path.split("/") if part]
        replaced = None if existing is None else kind_of(existing.st_mode)
        if replaced == "folder" and not member.isdir():
            self._note_removal(path, replaced)
        if content is not None or member.islnk() or replaced == "file":
            self._changes.add(joined(self._shown_as, path), self.target, parts)
        self.target.put(member, parts, content)
        if content is not None and time_of(member) > self._since:
            self.written.append((time_of(member), path))
            if parts[-1].endswith(".py"):
                self._remove_compiled(parts)

    def _remove_compiled(self, parts: list[str]) -> None:
        """Remove what Python compiled of the replaced source: it recognises a changed source by its size and its time in
        whole seconds, and the new one may have the same.
        """
        folder, stem = [*parts[:-1], CACHE_FOLDER], parts[-1].removesuffix("py")
        with contextlib.suppress(OSError, Refused):
            cache = self.target.parent([*folder, ""], is_made=False)
            try:
                for name in os.listdir(cache):
                    if name.startswith(stem) and name.endswith(COMPILED_SUFFIXES):
                        os.unlink(name, dir_fd=cache)
            finally:
                os.close(cache)

    def _drop(self, path: str, reason: str) -> None:
        self._dropped.add(joined(self._shown_as, path), reason)

    def _refusal(self, member: tarfile.TarInfo, path: str, content: IO[bytes] | None) -> str | None:
        """Return why a member is not written; empty if the reason is not reported, None if it is written."""
        rules, prepared = self.rules, self.prepared
        if not rules.is_declared(path):
            return None if member.isdir() and rules.leads_to_declared(path) else ""
        if (reason := prepared.reason(path)) is not None:
            if not _is_same(os.path.join(self.location, path), member, content):
                return reason
            if member.isreg():
                self.placed[path] = "file"  # hard links to it may follow
            return ""
        if path in prepared.ways and not member.isdir():
            return IN_PLACE_OF_FOLDER
        if member.isdir():
            return COMPILED if rules.loaded(path, "folder") == COMPILED else None
        if member.issym():
            if leads_out(self.location, path, member.linkname, self._places):
                if _is_same(os.path.join(self.location, path), member, content):
                    return None
                return LEADS_OUT % shown(member.linkname)
            return COMPILED if rules.loaded(path, "link") == COMPILED else None
        # A hard link to a symbolic link would be a symbolic link elsewhere, and may lead out of the folder from there.
        if member.islnk() and self.placed.get(os.path.normpath(member.linkname)) != "file":
            return f"is a hard link to {shown(member.linkname)}, which is not carried"
        if not (member.isreg() or member.islnk()):
            return "is not a file, folder or link"
        return COMPILED if rules.loaded(path, "file") == COMPILED else None

    def sweep(self) -> None:
        """Remove files that the agent deleted, and files that are loaded automatically, wherever they are."""
        rules, prepared = self.rules, self.prepared
        for parent, name, path, kind in self.walk(prepared.enters):
            # A tar has no sockets and devices, so those that exist here are not the agent's.
            if path in prepared.kept or path in prepared.ways or not rules.is_declared(path) or kind == "other":
                continue
            if kind != "file" and name in OF_PACKAGES:
                rules.import_roots.add(path)
            reason = self.reason(parent, path, kind)
            if reason == COMPILED or (path in self.placed and reason is None):
                continue
            if kind == "folder" and path in self.placed and rules.leads_to_declared(path):
                continue
            if path in self.placed:
                self._drop(path, reason or "")
            elif not _may_read(parent, name):
                continue  # the tar leaves out entries that the agent cannot read, so a missing entry may not be deleted
            else:
                self._note_removal(path, kind)
            _remove(parent, name)

    def _note_removal(self, path: str, kind: Kind) -> None:
        files = [path] if kind == "file" else []
        if kind == "folder":
            for folder, _, names in os.walk(os.path.join(self.location, path)):
                files += [os.path.relpath(os.path.join(folder, name), self.location) for name in names]
        for file in files:
            self._changes.add(joined(self._shown_as, file), self.target, file.split("/"))

    def remove(self, path: str, reason: str) -> None:
        folder = os.open(os.path.join(self.location, os.path.dirname(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            _remove(folder, os.path.basename(path))
        finally:
            os.close(folder)
        self._drop(path, reason)


def _remove(parent: int, name: str) -> None:
    """Remove an entry if this process may. The agent runs as the same user, so an entry that cannot be removed is not
    the agent's.
    """
    try:
        remove_entry(parent, name, missing_ok=True)
    except PermissionError:
        return


def _make_newest(begun: Sequence[_Carrying]) -> None:
    """Give the files that the agent wrote times after those of all prepared files, in the same order.

    The setup of this workspace may have run after the agent. Without this, what it built outside of the artifacts would
    be newer than the agent's sources, and `make` would not build it again.
    """
    now = time.time_ns()

    def ordered(carrying: _Carrying) -> Iterator[tuple[int, Target, str]]:
        carrying.written.sort()
        return ((modified, carrying.target, path) for modified, path in carrying.written)

    renewed, latest = now, None
    for modified, target, path in heapq.merge(*map(ordered, begun), key=lambda entry: entry[0]):
        if modified > now:
            break
        if modified != latest:
            renewed, latest = renewed + _TIME_STEP, modified
        target.set_time(path.split("/"), renewed)


def _lstat(place: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.lstat(place)
    return None


def _may_be_unchanged(member: tarfile.TarInfo, existing: os.stat_result) -> bool:
    """Whether the existing file has the same owner, mode, size and time. It then stays if its content is the same too, so
    that prepared files take no disk space of the grading, and other users' files stay theirs.

    The agent may have moved another file there. All files of an image layer may have the same time, and its unit is
    seconds.
    """
    known = (member.isreg(), member.uid, member.gid, stat.S_IMODE(member.mode), member.size, time_of(member))
    mode = existing.st_mode
    found = (stat.S_ISREG(mode), existing.st_uid, existing.st_gid, stat.S_IMODE(mode), existing.st_size)
    return known == (*found, existing.st_mtime_ns)


class _Compared:
    """A member whose content is first compared with a file of the same size and can then be read from its beginning."""

    def __init__(self, existing: IO[bytes], content: IO[bytes]) -> None:
        self._existing, self._content = existing, content
        self._same = 0
        self._block = content.read(COPY_BYTES)
        while self._block and existing.read(len(self._block)) == self._block:
            self._same += len(self._block)
            self._block = content.read(COPY_BYTES)
        self.is_same = not self._block
        existing.seek(0)

    def read(self, size: int) -> bytes:
        if self._same:
            block = self._existing.read(min(size, self._same))
            self._same -= len(block)
        else:
            block, self._block = self._block or self._content.read(size), b""
        return block


def _is_same(existing: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> bool:
    """Whether a member equals the existing entry."""
    try:
        info = os.lstat(existing)
        if member.issym():
            return stat.S_ISLNK(info.st_mode) and os.readlink(existing) == member.linkname
        if content is None or not stat.S_ISREG(info.st_mode):
            # The content of a hard link was reported under its first name.
            return stat.S_ISDIR(info.st_mode) if member.isdir() else member.islnk() and stat.S_ISREG(info.st_mode)
        with open(existing, "rb") as file:
            return info.st_size == member.size and _Compared(file, content).is_same
    except OSError:
        return False


def _may_read(parent: int, name: str) -> bool:
    """Whether the workspace's user may read an entry with its own rights."""
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode) or info.st_uid == os.getuid():
        return True
    # The kernel checks the real user here, not this process's capabilities.
    return os.access(name, os.R_OK | (os.X_OK if stat.S_ISDIR(info.st_mode) else 0), dir_fd=parent)


def carry(location: str, stream: int, searched: Sequence[str] = (), programs: Sequence[str] = ()) -> Message:
    """Read a line of rules and the tar after it, and write its files into folders below `location`, an absolute path.

    The line is a list: the rules for each `root`, a file or folder below `location`. `searched` are the absolute paths
    from which Python imports in this workspace, `programs` those of its `PATH`. Returns `dropped`, the agent's files
    that were left out with the reasons, `more`, the number of dropped files that are not listed, and `changes`, a diff of
    what differs from the prepared files. Raises Refused.
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
        changes = Changes()

        def begin(root: str, *, is_folder: bool) -> tuple[_Carrying, list[str]]:
            """Return the `_Carrying` of a root, and the root's path in it."""
            place, form, path = os.path.realpath(os.path.join(location, root)), forms[root], list[str]()
            if not is_folder:
                # A single file is carried into its folder, as the only allowed file.
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
            begun.append(_Carrying(place, root, rules, places, dropped, changes, form.get("since")))
            return begun[-1], path

        left = set(forms)
        entries = ((root, *entry) for entry in members(file) for root in forms if _is_below("/".join(entry[1]), root))
        for root, group in itertools.groupby(entries, lambda entry: entry[0]):
            if root not in left:
                raise Refused(errno.EINVAL, root, f"the tar's entries of {shown(root)} do not follow one another")
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
        for root in left:  # the agent deleted everything in this root
            place = os.path.join(location, root)
            if os.path.lexists(place):
                begin(root, is_folder=os.path.isdir(place))[0].sweep()
        for carrying in begun:
            carrying.remove_planted(begun)
        _make_newest(begun)
        report = {**dropped.report(), "changes": changes.report()}
        for carrying in begun:
            carrying.target.finish()
        return report


def _is_below(path: str, root: str) -> bool:
    return root == "." or path == root or path.startswith(f"{root}/")

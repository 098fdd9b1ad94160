"""Apply an agent's patch and the hidden tests to the repository for grading; exit with 1 if they do not apply. It is
started in the prepared repository, before any change by the agent. Next to this file are `tree_rules.py`,
`tree_rules.json`, `instance.json`, and the hidden tests as `tests.patch.0` and so on.
"""
# ruff: noqa: UP031 (the oldest images of SWE-bench have Python 3.5)

import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_runtime.executor.init.tree_rules import (
        IN_PLACE_OF_FOLDER,
        LEADS_OUT,
        Kind,
        Rules,
        Tree,
        kind_in,
        leads_out,
        parents,
    )
else:
    from tree_rules import IN_PLACE_OF_FOLDER, LEADS_OUT, Rules, Tree, kind_in, leads_out, parents

HERE = os.path.dirname(os.path.abspath(__file__))


def git(*arguments: str, data: bytes = b"") -> bytes:
    """Return the output of git. Exits if git fails."""
    run = subprocess.Popen(["git", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    output, _ = run.communicate(data)
    if run.returncode:
        sys.exit("git %s failed with exit code %d" % (" ".join(arguments[:2]), run.returncode))
    return output


class Repository(Tree):
    """The repository to which an agent's patch is applied."""

    # Tests reach the code under test, which the solution changes, through such links.
    protects_test_link_targets = False

    def __init__(self, prepared: str, rules: Rules) -> None:
        self._prepared_tree = prepared
        self._folders = {"."}
        super().__init__(os.getcwd(), rules)

    def walk(self, enters: "Callable[[str], bool]") -> "Iterator[tuple[int, str, str, Kind]]":
        for folder, folders, files, parent in os.fwalk("."):
            # Skip `.git`, which a patch cannot change, and our own folders, which are not part of the repository.
            folders[:] = [name for name in folders if folder != "." or not name.startswith((".git", ".rollout-"))]
            left = []
            for name in folders + files:
                path, kind = os.path.join(folder, name)[2:], kind_in(parent, name)
                if kind == "folder":
                    self._folders.add(path)
                yield parent, name, path, kind
                if kind == "folder" and enters(path):
                    left.append(name)
            folders[:] = left

    def remove(self, path: str, reason: str) -> None:
        if self.placed.pop(path, None):
            print("left out: %s %s" % (path, reason))
            restore(self._prepared_tree, path)

    def apply(self, patch: str) -> None:
        """Apply a patch without changes that would let it decide its own verdict."""
        # --index refuses changes of files that git ignores, such as the hidden tests; --check refuses paths through
        # links. A patch must not write to our own folders, which have reports and tests.
        for how in ("--check", "--index"):
            git("apply", how, "--whitespace=nowarn", "--exclude=.rollout-*", patch)
        listed = git("diff", "--cached", "--name-only", "--no-renames", "-z", self._prepared_tree)
        for path in listed.decode("utf-8", "surrogateescape").split("\0")[:-1]:
            self.placed[path] = "link" if os.path.islink(path) else "file"
        # Also check folders that the patch creates, because PYTHONPATH or a configuration may name them.
        new = {os.path.dirname(path) or "." for path in self.placed} - self._folders
        self.rules.import_roots.update(path for path in new if not os.path.exists(os.path.join(path, "__init__.py")))
        for path, kind in sorted(self.placed.items()):
            reason = self.refusal(path, kind)
            if reason is not None:
                self.remove(path, reason)
        self.remove_planted([self])

    def refusal(self, path: str, kind: "Kind") -> "str | None":
        """Return why a patch's change of a path is undone; None if it is not."""
        reason = self.prepared.reason(path)
        if reason is not None or not os.path.lexists(path):
            return reason
        if path in self.prepared.ways:
            return IN_PLACE_OF_FOLDER
        if kind == "link" and leads_out(self.location, path, os.readlink(path)):
            return LEADS_OUT % os.readlink(path)
        parent = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.reason(parent, path, kind)
        finally:
            os.close(parent)


def main() -> None:
    """Apply the agent's patch without changes that would decide its verdict; then restore the tests, and add the hidden
    ones.
    """
    rules = dict(load("instance.json"), **load("tree_rules.json"))
    # Use our own configuration and index of git, because those of the repository are untrusted.
    scratch = tempfile.mkdtemp()
    os.environ.update(HOME=scratch, GIT_CONFIG_NOSYSTEM="1", GIT_INDEX_FILE=os.path.join(scratch, "index"))
    git("config", "--global", "--add", "safe.directory", "*")
    if os.path.exists(rules["patch"]) and os.path.getsize(rules["patch"]):
        git("read-tree", rules["prepared"])
        git("add", "-A")
        Repository(rules["prepared"], Rules(rules)).apply(rules["patch"])
    for path in rules["hidden"]:
        restore(rules["base"], path)
    tests = b""
    for number in range(sum(name.startswith("tests.patch.") for name in os.listdir(HERE))):
        with open(os.path.join(HERE, "tests.patch.%d" % number), "rb") as part:
            tests += part.read()
    if tests:
        git("apply", "--whitespace=nowarn", data=tests)
    shutil.rmtree(scratch, ignore_errors=True)


def load(name: str) -> "dict[str, Any]":
    with open(os.path.join(HERE, name)) as file:
        return dict(json.load(file))


def restore(tree: str, path: str) -> None:
    """Restore a path as in a tree: its content, or its absence."""
    if any(os.path.islink(folder) for folder in parents(path)):
        pass  # the path leads through a link
    elif os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    files = git("ls-tree", "-r", "-z", "--name-only", tree, "--", path)
    if files:
        git("read-tree", tree)
        git("checkout-index", "--force", "-z", "--stdin", data=files)


if __name__ == "__main__":
    main()

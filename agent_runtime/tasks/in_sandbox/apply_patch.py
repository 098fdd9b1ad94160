"""Bring an agent's patch and the hidden tests into the repository that grades them; ends with 1 where they do not fit.

Started in the repository before anything that the agent wrote is there. Beside this file lie `instance.json`,
`loaded_by_itself.json`, and the hidden tests as `tests.patch.0` and on.
"""
# ruff: noqa: UP031 (the oldest images of SWE-bench have Python 3.5)

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def git(*arguments: str, data: bytes = b"") -> bytes:
    """Output of git. Ends the program where git fails."""
    run = subprocess.Popen(["git", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    output, _ = run.communicate(data)
    if run.returncode:
        sys.exit("git %s failed with exit code %d" % (" ".join(arguments[:2]), run.returncode))
    return output


def read_json(name: str) -> Any:
    """A file beside this one."""
    with open(os.path.join(HERE, name)) as file:
        return json.load(file)


def main() -> None:
    """Agent's patch, without what would be loaded by itself; then the tests as they were, and the hidden ones."""
    instance, by_itself = read_json("instance.json"), read_json("loaded_by_itself.json")
    # git's configuration and index are our own: those of the repository may be anything.
    scratch = tempfile.mkdtemp()
    os.environ.update(HOME=scratch, GIT_CONFIG_NOSYSTEM="1", GIT_INDEX_FILE=os.path.join(scratch, "index"))
    git("config", "--global", "--add", "safe.directory", "*")
    git("read-tree", instance["prepared"])
    if os.path.exists(instance["patch"]) and os.path.getsize(instance["patch"]):
        # Our own folders hold reports and tests: nothing of them is a patch's to write.
        git("apply", "--whitespace=nowarn", "--exclude=.rollout-*", instance["patch"])
        for status, path in changes(instance["prepared"]):
            if path not in instance["allowed"] and is_loaded_by_itself(path, status, by_itself):
                print("left out, as Python or pytest would load it by itself: %s" % path)
                restore(instance["prepared"], path)
    for path in instance["tests"]:
        restore(instance["base"], path)
    number, tests = 0, b""
    while os.path.exists(os.path.join(HERE, "tests.patch.%d" % number)):
        with open(os.path.join(HERE, "tests.patch.%d" % number), "rb") as part:
            tests += part.read()
        number += 1
    if tests:
        git("apply", "--whitespace=nowarn", data=tests)
    shutil.rmtree(scratch, ignore_errors=True)


def changes(prepared: str) -> "list[tuple[str, str]]":
    """What the patch did: pairs of A, M or D with a path."""
    git("add", "-A")
    listed = git("diff", "--cached", "--name-status", "--no-renames", "-z", prepared).decode("utf-8", "surrogateescape")
    parts = listed.split("\0")
    return list(zip(parts[0::2], parts[1::2]))  # noqa: B905


def is_loaded_by_itself(path: str, status: str, by_itself: "dict[str, Any]") -> bool:
    """Whether Python, pytest or their tools would take the file without being asked to."""
    if re.search(by_itself["pattern"], path):
        return True
    folder, name = os.path.split(path)
    module, package = (name.split(".")[0], folder) if name != "__init__.py" else os.path.split(folder)[::-1]
    # Inside of a package it is a module like any other; beside a package or a script it stands in for the real one.
    is_module = name.endswith((".py", ".so"))
    shadows = is_module and (module in by_itself["shadowed"] or module.startswith("pytest_"))
    return bool(status == "A" and shadows) and not os.path.exists(os.path.join(package, "__init__.py"))


def restore(tree: str, path: str) -> None:
    """The path as it is in a tree: its content, or nothing."""
    if os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    if git("ls-tree", tree, "--", path):
        git("read-tree", tree)
        git("checkout-index", "--force", "--", path)


if __name__ == "__main__":
    main()

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
ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}
"""Either makes its folder a Python environment."""
TEST_FOLDER = re.compile("^((?:.*?/)??tests?/)")
"""The outermost folder of tests in a path: a solution does not lie there."""


def git(*arguments: str, data: bytes = b"") -> bytes:
    """Output of git. Ends the program where git fails."""
    run = subprocess.Popen(["git", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    output, _ = run.communicate(data)
    if run.returncode:
        sys.exit("git %s failed with exit code %d" % (" ".join(arguments[:2]), run.returncode))
    return output


def main() -> None:
    """Agent's patch, without what would be loaded by itself; then the tests as they were, and the hidden ones."""
    rules = {}  # type: dict[str, Any]
    for name in ("instance.json", "loaded_by_itself.json"):
        with open(os.path.join(HERE, name)) as file:
            rules.update(json.load(file))
    # git's configuration and index are our own: those of the repository may be anything.
    scratch = tempfile.mkdtemp()
    os.environ.update(HOME=scratch, GIT_CONFIG_NOSYSTEM="1", GIT_INDEX_FILE=os.path.join(scratch, "index"))
    git("config", "--global", "--add", "safe.directory", "*")
    if os.path.exists(rules["patch"]) and os.path.getsize(rules["patch"]):
        git("read-tree", rules["prepared"])
        git("add", "-A")
        rules["before"] = before = {folder[2:]: folders + files for folder, folders, files in os.walk(".")}
        files = [os.path.join(folder, name) for folder in before for name in before[folder] if name.endswith(".py")]
        known = rules["tests"] + [path for path in files if re.search(rules["pattern"], path)]
        rules["testFolders"] = {folder for path in known for folder in TEST_FOLDER.findall(path)}
        # --index lets the patch change no file that git ignores, the hidden tests among them; --check, follow no link.
        # Our own folders hold reports and tests: nothing of them is a patch's to write.
        for how in ("--check", "--index"):
            git("apply", how, "--whitespace=nowarn", "--exclude=.rollout-*", rules["patch"])
        for status, path in changes(rules["prepared"]):
            if path not in rules["allowed"] and is_loaded_by_itself(path, status, rules):
                print("left out, as Python or pytest would load it by itself: %s" % path)
                restore(rules["prepared"], path)
    for path in rules["tests"]:
        restore(rules["base"], path)
    tests = b""
    for number in range(sum(name.startswith("tests.patch.") for name in os.listdir(HERE))):
        with open(os.path.join(HERE, "tests.patch.%d" % number), "rb") as part:
            tests += part.read()
    if tests:
        git("apply", "--whitespace=nowarn", data=tests)
    shutil.rmtree(scratch, ignore_errors=True)


def changes(prepared: str) -> "list[tuple[str, str]]":
    """What the patch did: pairs of A, M or D with a path."""
    listed = git("diff", "--cached", "--name-status", "--no-renames", "-z", prepared).decode("utf-8", "surrogateescape")
    parts = listed.split("\0")
    return list(zip(parts[0::2], parts[1::2]))  # noqa: B905


def is_loaded_by_itself(path: str, status: str, rules: "dict[str, Any]") -> bool:
    """Whether Python, pytest or their tools would take the file without being asked to."""
    before, (folder, name) = rules["before"], os.path.split(path)
    above = [path[:end] for end, character in enumerate(path) if character == "/"]
    if re.search(rules["pattern"], path) or any(ENVIRONMENT.intersection(before.get(parent, ())) for parent in above):
        return True
    # A link may lead to a package.
    if not name.endswith((".py", ".so")) and ("." in name or not os.path.islink(path)):
        return False
    if not rules["testFolders"].isdisjoint(TEST_FOLDER.findall(path)):
        return True
    module, package = (name.split(".")[0], folder) if name != "__init__.py" else os.path.split(folder)[::-1]
    file = os.path.join(package, module + ".py")
    # Inside of a package it is a module like any other; beside a package or a script it stands in for the real one. A
    # patch may bring new packages, but make none of a folder that was there.
    siblings = before[package] if package in before else os.listdir(package)
    shadows = "__init__.py" not in siblings and (module in rules["shadowed"] or module.startswith("pytest_"))
    return status == "A" and bool(shadows or file in rules["tests"] or re.search(rules["pattern"], file))


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

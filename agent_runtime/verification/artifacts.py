"""Which of the agent's files are carried into the workspace that grades them.

What Python and pytest load or collect without being asked to is never carried: the grading keeps the version of the
prepared state, or none. A task whose solution lies in such a file names it in `verifier.artifacts`. The executor applies
these rules to the real tree; docs/verification.md tells what this closes, and what it cannot.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

from agent_runtime.tasks.loaded_by_python import LOADED_BY_THEMSELVES, METADATA_SUFFIXES, SHADOWED, TEST_FILES
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task, VerifierKind

_SEARCHED = re.compile(r"""(?<![A-Za-z_])(PATH|PYTHONPATH)=((?:`pwd`|\$\(pwd\)|[^\s'"`;&|]|"[^"]*"|'[^']*')+)""")
_BETWEEN = re.compile(r"""[:'"]|(?:\$\{?PWD\}?|\$\(pwd\)|`pwd`)/?""")


def carry_rules(task: Task, verifier: Verifier, working_dir: str) -> tuple[str, dict[str, Any]]:
    """The folder that a task's artifacts go into, and the rules for it that the executor takes."""
    folder = task.verifier.artifacts_folder if task.verifier else None
    root = posixpath.normpath(posixpath.join(working_dir, folder or "."))
    hidden = [posixpath.join(working_dir, file.path) for file in (task.verifier.files if task.verifier else ())]
    variables = {variable.name: variable.value for variable in (task.verifier.env if task.verifier else ())}
    commands = task.verifier.commands if task.verifier else []
    is_pytest = task.verifier is not None and task.verifier.kind is VerifierKind.PYTEST
    texts = [file.content for file in (task.verifier.files if task.verifier else ()) if file.content]
    given = [(name, variables.get(name, "")) for name in ("PATH", "PYTHONPATH")]
    searched: dict[str, list[str]] = {"PATH": [], "PYTHONPATH": []}
    for name, value in [*given, *_SEARCHED.findall("\n".join([*commands, *texts]))]:
        paths = (posixpath.join(working_dir, path) for path in _BETWEEN.split(value) if path)
        searched[name] += [posixpath.relpath(path, root) for path in paths if is_below(path, root)]
    return folder or ".", {
        "artifacts": verifier.artifacts if folder is None else ["."],
        "hidden": [posixpath.relpath(path, root) for path in hidden if is_below(path, root)],
        "importRoots": searched["PYTHONPATH"],
        "programFolders": searched["PATH"],
        "names": sorted(LOADED_BY_THEMSELVES),
        "tests": [*TEST_FILES, *(_named_tests(commands) if is_pytest else ())],
        "options": [text for text in (*variables.values(), *commands, *texts) if "python_files" in text],
        "metadata": METADATA_SUFFIXES,
        "modules": sorted(SHADOWED),
    }


def _named_tests(commands: Sequence[str]) -> Iterator[str]:
    """The files that pytest's commands name, which are tests whatever they are called."""
    for command in commands:
        words = re.split(r"[\s'\"]+", command)
        if not any(word.startswith("--doctest") for word in words):
            yield from (posixpath.normpath(word) for word in words if word.endswith(".py"))


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path lies in an absolute folder."""
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")

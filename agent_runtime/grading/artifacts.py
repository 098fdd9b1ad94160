"""Rules for which of the agent's files are carried (copied) into the grading workspace. Files that Python and pytest
load automatically are not carried: the prepared version stays, or no file. If a task's solution is such a file, the
task names it in `verifier.artifacts`. The executor applies the rules to the files; docs/verification.md explains which
attacks they prevent, and their limits.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent_runtime.tasks.loaded_by_python import LOADED_AUTOMATICALLY, METADATA_SUFFIXES, SHADOWED, TEST_FILES
from rollout_api.files import TaskFile
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import ISOLATED_FOLDER, Task, VerifierKind

_SCRIPT_CHARACTERS = 1 << 20
"""Largest hidden file, in characters of base64, that is searched for names of folders."""

_WORD = r"""((?:`pwd`|\$\(pwd\)|[^\s'"`;&|()]|"[^"\n]*"|'[^'\n]*')+)"""
_SEARCHED = re.compile(rf"(?<![A-Za-z_])(PATH|PYTHONPATH)={_WORD}")
_ENTERED = re.compile(rf"(?:(?<![\w.-])(?:cd|pushd)(?:[ \t]+--)?[ \t]+|\bchdir\(|\bcwd=){_WORD}")
_HERE = re.compile(r"\$\{?PWD\}?(?=/|$)|\$\(pwd\)|`pwd`")


def verifier_folder(task: Task, working_dir: str) -> str:
    """Return the folder in which the verifier's commands run, and which relative paths of hidden files refer to."""
    return ISOLATED_FOLDER if task.verifier is not None and task.verifier.isolated else working_dir


def _given(task: Task, working_dir: str) -> set[str]:
    """Return the task's artifacts as absolute paths."""
    given = (task.verifier.artifacts if task.verifier else None) or ["."]
    return {posixpath.normpath(posixpath.join(working_dir, path)) for path in given}


def artifact_paths(task: Task, working_dir: str) -> tuple[str, list[str]]:
    """Return the folder that contains a task's artifacts, and their paths relative to it, none of them inside another
    one.
    """
    paths = _given(task, working_dir)
    base = posixpath.commonpath([posixpath.normpath(working_dir), *paths])
    return base, sorted(
        posixpath.relpath(path, base) for path in paths if not any(is_below(path, other) for other in paths)
    )


def carry_rules(
    task: Task, verifier: Verifier, working_dir: str, *, since: float | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Return the folder that contains a task's artifacts, and the executor's rules for each of them. `since` is the Unix
    time at which the agent started.
    """
    spec = task.verifier
    own, files, commands = (spec.artifacts, spec.files, spec.commands) if spec else ([], [], [])
    is_pytest = spec is not None and spec.kind is VerifierKind.PYTEST
    variables = {variable.name: variable.value for variable in (spec.env if spec else ())}
    texts = [*commands, *map(_text, files)]
    hidden = [posixpath.join(verifier_folder(task, working_dir), file.path) for file in files]
    searched = _searched(working_dir, variables, texts)
    base, paths = artifact_paths(task, working_dir)
    given = sorted(_given(task, working_dir))

    def inside(path: str, places: Iterable[str]) -> list[str]:
        root = posixpath.normpath(posixpath.join(base, path))
        normal = map(posixpath.normpath, places)
        return [posixpath.relpath(place, root) for place in normal if place == root or is_below(place, root)]

    def above(path: str) -> list[str]:
        """Return `..` if Python imports from the folder that contains the artifact, so that the artifact is a module
        there.
        """
        parent = posixpath.dirname(posixpath.normpath(posixpath.join(base, path)))
        return [".."] if parent in searched["PYTHONPATH"] else []

    def seen_as(path: str) -> str:
        """Return the path of an artifact to which rules for folder names apply, without folders above the working
        directory.
        """
        relative = posixpath.relpath(posixpath.join(base, path), working_dir)
        if set(relative.split("/")) == {".."}:
            return "."
        return posixpath.basename(relative) if relative.startswith("../") else relative

    return base, [
        {
            "root": path,
            "seenAs": seen_as(path),
            "artifacts": inside(path, given) if own else verifier.artifacts,
            "hidden": inside(path, hidden),
            "importRoots": [*above(path), *inside(path, searched["PYTHONPATH"])],
            "programFolders": inside(path, searched["PATH"]),
            "names": sorted(LOADED_AUTOMATICALLY),
            "tests": [*TEST_FILES, *(_named_tests(commands) if is_pytest else ())],
            "options": [text for text in (*variables.values(), *texts) if "python_files" in text],
            "metadata": METADATA_SUFFIXES,
            "modules": sorted(SHADOWED),
            "since": since,
        }
        for path in paths
    ]


def _text(file: TaskFile) -> str:
    """Return a file as text; empty if it is not text, or larger than a script."""
    if file.content is not None:
        return file.content
    data = b"" if len(file.content_base64 or "") > _SCRIPT_CHARACTERS else file.data()
    return "" if b"\0" in data else data.decode(errors="replace")


def _searched(working_dir: str, variables: Mapping[str, str], texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the folders in which the verifier searches commands (`PATH`) and modules (`PYTHONPATH`). Python also
    imports from the folder in which it is started.
    """
    text = "\n".join(texts)
    folders = [working_dir]
    for entered in _ENTERED.findall(text):
        path = _path(entered)
        folders += [posixpath.join(folder, path) for folder in dict.fromkeys((working_dir, folders[-1]))]
    searched: dict[str, list[str]] = {"PATH": [], "PYTHONPATH": [*folders]}
    given = [(name, variables[name]) for name in searched if name in variables]
    for name, value in [*given, *_SEARCHED.findall(text)]:
        paths = map(_path, re.split("[:;]", value))
        searched[name] += [posixpath.join(folder, path) for path in paths for folder in folders]
    return {name: [*dict.fromkeys(map(posixpath.normpath, found))] for name, found in searched.items()}


def _path(word: str) -> str:
    """Return a word of a shell command as a path. `$PWD` and the like are resolved to the shell's folder."""
    return _HERE.sub(".", re.sub(r"['\"]", "", word))


def _named_tests(commands: Sequence[str]) -> Iterator[str]:
    """Yield the files that pytest commands name; they are tests regardless of their names."""
    for command in commands:
        words = re.split(r"[\s'\"]+", command)
        # Others, such as a linter's, may name the agent's own files.
        if runs_pytest(command) and not any(word.startswith("--doctest") for word in words):
            yield from (posixpath.normpath(word) for word in words if word.endswith(".py"))


def runs_pytest(command: str) -> bool:
    """Whether the text of a command shows that it runs pytest. A script may run it too."""
    return re.search(r"py\.?test", command, re.IGNORECASE) is not None


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is inside an absolute folder."""
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")

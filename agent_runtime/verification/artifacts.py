"""Which of the agent's files are carried into the workspace that grades them.

What Python and pytest load without being asked to is never carried: the grading keeps the version of the prepared state,
or none. A task whose solution lies in such a file names it in `verifier.artifacts`. The executor applies these rules to
the real tree; docs/verification.md tells what this closes, and what it cannot.
"""

import posixpath
from typing import Any

from agent_runtime.tasks.loaded_by_python import LOADED_BY_THEMSELVES, METADATA_SUFFIXES, SHADOWED
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task


def carry_rules(task: Task, verifier: Verifier, working_dir: str) -> tuple[str, dict[str, Any]]:
    """The folder that a task's artifacts go into, and the rules for it that the executor takes."""
    folder = task.verifier.artifacts_folder if task.verifier else None
    root = posixpath.normpath(posixpath.join(working_dir, folder or "."))
    hidden = [posixpath.join(working_dir, file.path) for file in (task.verifier.files if task.verifier else ())]
    variables = {variable.name: variable.value for variable in (task.verifier.env if task.verifier else ())}
    imported = [posixpath.join(working_dir, path) for path in variables.get("PYTHONPATH", "").split(":") if path]
    return folder or ".", {
        "artifacts": verifier.artifacts if folder is None else ["."],
        "hidden": [posixpath.relpath(path, root) for path in hidden if is_below(path, root)],
        "importRoots": [posixpath.relpath(path, root) for path in imported if is_below(path, root)],
        "names": sorted(LOADED_BY_THEMSELVES),
        "metadata": METADATA_SUFFIXES,
        "modules": sorted(SHADOWED),
    }


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path lies in an absolute folder."""
    return posixpath.normpath(path).startswith(posixpath.normpath(folder).rstrip("/") + "/")

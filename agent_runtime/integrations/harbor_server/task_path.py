"""Where the task of a row lies, in the order of verl-recipe PR #83."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOTS_VARIABLE = "HARBOR_DATASET_DIRS"
"""Environment variable with more roots, separated by `:` or `,`."""


class NoTask(ValueError):
    """A row's task is nowhere; the message says where it was looked for."""


def roots_of(config: Mapping[str, Any], environ: Mapping[str, str]) -> list[Path]:
    """`data.train_harbor_dir`, `data.val_harbor_dir`, then HARBOR_DATASET_DIRS; each once."""
    data = config.get("data") or {}
    listed = environ.get(ROOTS_VARIABLE, "").replace(":", ",").split(",")
    names = [data.get("train_harbor_dir"), data.get("val_harbor_dir"), *listed]
    texts = [str(name).strip() for name in names if name is not None]
    return list(dict.fromkeys(Path(os.path.expanduser(text)) for text in texts if text))


def task_path(instance_id: str, local_task_path: str | None, roots: Sequence[Path], template: str | None) -> Path:
    """The folder of a task: `local_task_path`, else `<root>/<instance_id>`, else the template with `{instance_id}`.

    Raises NoTask where none of them is a folder, and for an id that leads out of a root.
    """
    tried: list[Path] = []
    if local_task_path:
        tried.append(Path(os.path.expanduser(local_task_path)))
    if instance_id:
        if instance_id.startswith("/") or ".." in Path(instance_id).parts:
            raise NoTask(f"instance_id {instance_id!r} leads out of the folders of tasks; expected a name in them")
        tried += [root / instance_id for root in roots]
        if template:
            tried.append(Path(os.path.expanduser(template.replace("{instance_id}", instance_id))))
    found = next((path for path in tried if path.is_dir()), None)
    if found is None:
        listed = ", ".join(map(str, tried)) or "nowhere: the row has neither local_task_path nor instance_id"
        raise NoTask(
            f"the task {instance_id!r} is not there; looked at {listed}. Set data.train_harbor_dir, {ROOTS_VARIABLE} or "
            "REMOTE_AGENT_TASK_PATH_TEMPLATE"
        )
    return found

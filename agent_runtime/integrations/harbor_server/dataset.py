"""Harbor task folders as rows of verl's data, in one Parquet file with the columns and the file name of verl-recipe PR
#83.

Intermediate folders are searched too, unlike in PR #83.
"""

import hashlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_runtime.export.parquet import PyarrowMissing, json_text
from agent_runtime.export.whole_file import whole_file
from agent_runtime.tasks import TaskProblem, TaskSourceError

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
DATA_SOURCE, ABILITY = "harbor", "agent"
"""Values of the columns `data_source` and `ability` unless the user sets them."""
CACHE: Final = "~/.cache/verl/agentic/harbor"
"""Default of PR #83's `data.harbor_cache_dir`."""


def find_tasks(root: Path) -> list[Path]:
    """Return every folder below a root with a task.toml and an instruction.md, by path. Folders inside a task are
    skipped.

    Raises FileNotFoundError.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: the folder of Harbor tasks does not exist")
    found = []
    for folder, names, files in os.walk(root, followlinks=False):
        if CONFIG in files and INSTRUCTION in files:
            names.clear()
            found.append(Path(folder))
        names[:] = sorted(name for name in names if name != ".git")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def rows_of(
    root: Path, *, split: str, data_source: str = DATA_SOURCE, ability: str = ABILITY, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each task, at most `limit`, in order. Raises FileNotFoundError, TaskSourceError with all
    problems.
    """
    problems: list[TaskProblem] = []
    rows: list[dict[str, Any]] = []
    seen: dict[str, Path] = {}
    for index, folder in enumerate(find_tasks(root)[:limit]):
        if (other := seen.setdefault(folder.name, folder)) is not folder:
            message = (
                f"the task name {folder.name!r} is also used by {other}, but instance_id must be unique; rename one"
            )
            problems.append(TaskProblem(str(folder), None, message))
        try:
            prompt = (folder / INSTRUCTION).read_text(encoding="utf-8-sig")
            metadata = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8-sig")).get("metadata", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(TaskProblem(str(folder), None, f"cannot be read: {error}"))
            continue
        if not isinstance(metadata, dict):
            problems.append(TaskProblem(str(folder), None, f"{CONFIG}: metadata is {metadata!r:.60}, expected a table"))
            continue
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": prompt}],
                "ability": ability,
                "reward_model": {"style": "rule", "ground_truth": folder.name},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "task_id": folder.name,
                    "local_path": str(folder),
                    "task_metadata": metadata,
                },
                "instance_id": folder.name,
                "local_task_path": str(folder),
            }
        )
    if not rows and not problems:
        problems = [TaskProblem(str(root), None, f"has no folder with {CONFIG} and {INSTRUCTION}")]
    if problems:
        raise TaskSourceError(problems)
    return rows


def file_name(root: Path, split: str, limit: int | None, data_source: str = DATA_SOURCE, ability: str = ABILITY) -> str:
    """Return `<split>-<md5[:10]>.parquet`. The digest has the same inputs as in PR #83, and columns with other values."""
    signature = f"{root.resolve()}|split={split}|limit={limit}"
    if (data_source, ability) != (DATA_SOURCE, ABILITY):
        signature += f"|data_source={data_source}|ability={ability}"
    return f"{split}-{hashlib.md5(signature.encode(), usedforsecurity=False).hexdigest()[:10]}.parquet"


def write_dataset(
    root: Path,
    *,
    split: str,
    cache_dir: Path,
    data_source: str = DATA_SOURCE,
    ability: str = ABILITY,
    limit: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Return the Parquet file of a root. An existing one is kept, unless `overwrite`, or a task is newer.

    Raises FileNotFoundError, TaskSourceError, PyarrowMissing.
    """
    root = root.expanduser().absolute()
    file = cache_dir.expanduser() / file_name(root, split, limit, data_source, ability)
    if file.exists() and not overwrite and _newest(root) <= file.stat().st_mtime:
        return file
    rows = rows_of(root, split=split, data_source=data_source, ability=ability, limit=limit)
    for row, metadata in zip(rows, alike([row["extra_info"]["task_metadata"] for row in rows]), strict=True):
        row["extra_info"]["task_metadata"] = metadata
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PyarrowMissing from error
    with whole_file(file) as partial:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    return file


def harbor_files(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return `train_files` and `val_files` for verl's `data`, from its `train_harbor_dir` and `val_harbor_dir`; a side
    without a folder is left out. Raises as `write_dataset`.
    """
    data = config.get("data") or {}
    found = {}
    for split in ("train", "val"):
        if not (root := data.get(f"{split}_harbor_dir")):
            continue
        limit = data.get(f"harbor_{split}_limit")
        file = write_dataset(
            Path(str(root)),
            split=split,
            cache_dir=Path(str(data.get("harbor_cache_dir") or CACHE)),
            data_source=data.get("harbor_data_source") or DATA_SOURCE,
            ability=data.get("harbor_ability") or ABILITY,
            limit=None if limit is None else int(limit),
            overwrite=bool(data.get("harbor_overwrite")),
        )
        found[f"{split}_files"] = [str(file)]
    return found


def alike(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """Return the tables with a single type for each key, as Parquet requires. Keys with values of different types, or
    with nested values, become JSON text in all tables. If no table has a key, all results are None.
    """
    keys = sorted({key for table in tables for key in table})
    if not keys:
        return [None] * len(tables)
    plain = {
        key: len({type(table[key]) for table in tables if key in table} | {_kind(tables, key)}) == 1 for key in keys
    }
    return [{key: _cell(table[key], plain[key]) if key in table else None for key in keys} for table in tables]


def _kind(tables: Sequence[Mapping[str, Any]], key: str) -> type:
    """Return the Parquet type of a key, from its first value: a scalar's type, or a list of texts."""
    value = next(table[key] for table in tables if key in table)
    if isinstance(value, list):
        every = [item for table in tables if isinstance(table.get(key), list) for item in table[key]]
        return list if all(isinstance(item, str) for item in every) else type(None)
    return type(value) if isinstance(value, str | int | float | bool) else type(None)


def _cell(value: Any, is_plain: bool) -> Any:
    if is_plain:
        return value
    return value if isinstance(value, str) else json_text(value) if _is_json(value) else str(value)


def _is_json(value: Any) -> bool:
    """Whether a value is JSON. TOML also has dates and times."""
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, str | int | float | bool)


def _newest(root: Path) -> float:
    """Return when a task was last added, removed or changed in data that its row contains."""
    tasks = find_tasks(root)
    folders = {root, *tasks, *(folder for task in tasks for folder in task.parents if root in folder.parents)}
    files = [task / name for task in tasks for name in (CONFIG, INSTRUCTION)]
    return max(path.stat().st_mtime for path in (*folders, *files))

"""Read manifests for commands, with readable errors and the command line's options applied."""

import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rollout_api.manifest import ManifestError, load_manifest, located_messages, path_of
from rollout_api.model import MODEL_SOURCES
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import TaskFormat, Tasks
from rolloutctl.errors import MANIFEST_HELP, CommandError, did_you_mean

_NAME_COLUMNS: Final = {TaskFormat.SWE_BENCH: "instance_id", TaskFormat.R2E: "instance_id"}
"""Columns with the task's name, where it is not `name`."""


_OPTIONS: Final = {"baseURL": "--model-url", "name": "--model-name", "env": "--api-key-env", "uri": "--output"}
"""Options by the last field of their place in a manifest."""

_REPLACED: Final = {*MODEL_SOURCES, "adapter"}
"""Fields of a model that the options replace."""


def read_manifest(path: Path) -> RolloutJob:
    """Return the job in a file. Raises CommandError with every problem as `file:line: field: message`."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        siblings = sorted(entry.name for entry in path.parent.glob("*") if entry.is_file())
        raise CommandError(
            f"{path}: {what}; expected a manifest file.{did_you_mean(path.name, siblings)}",
            hint="`rolloutctl init` writes an example manifest.",
        )
    try:
        job = load_manifest(path)
    except ManifestError as error:
        raise CommandError(describe(path, error), hint=MANIFEST_HELP) from error
    use_modules_in(path.parent)
    return job


def use_modules_in(folder: Path) -> None:
    """Let `module:name` refer to a module in a folder, such as the manifest's.

    Installed modules and PYTHONPATH come first, so that no file there replaces one of them.
    """
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.append(entry)


def describe(path: Path, error: ManifestError) -> str:
    return "\n".join(
        ": ".join(
            part
            for part in (f"{path}:{problem.line}" if problem.line else str(path), problem.path, problem.message)
            if part
        )
        for problem in error.problems
    )


def with_options(
    job: RolloutJob,
    *,
    output: str | None = None,
    model_url: str | None = None,
    model_name: str | None = None,
    api_key_env: str | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
) -> RolloutJob:
    """Return the job with the command line's options applied. Raises CommandError that names an invalid option."""
    document = job.wire()
    spec: dict[str, Any] = document["spec"]
    if output is not None:
        # An option is relative to the working directory, and the manifest's own value to the manifest.
        spec["output"]["uri"] = output if "://" in output else str(Path(output).resolve())
    if model_url or model_name or api_key_env:
        spec["model"] = _model(spec.get("model") or {}, model_url, model_name, api_key_env)
    if tasks or limit is not None:
        spec["tasks"] = _fewer(job.spec.tasks, spec["tasks"], tasks, limit)
    try:
        return RolloutJob.model_validate(document)
    except ValidationError as error:
        problems = [
            f"{_OPTIONS.get(str(location[-1]) if location else '', path_of(location))}: {message}"
            for location, message in located_messages(error, RolloutJob, document)
        ]
        raise CommandError(f"The manifest is invalid with these options: {'; '.join(problems)}") from error


def _fewer(tasks: Tasks, spec: dict[str, Any], names: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Return `spec.tasks` with only the tasks of these names, and at most `limit` of them. Raises CommandError."""
    if tasks.from_ is not None:
        source = dict(spec["from"])
        if names:
            column = _NAME_COLUMNS.get(tasks.from_.format, "name")
            source["filter"] = {**source.get("filter", {}), tasks.from_.columns.get(column, column): list(names)}
        if limit is not None:
            source["limit"] = min(limit, source.get("limit", limit))
        return {**spec, "from": source}
    if tasks.inline is None:
        raise CommandError("--task and --limit select from tasks.inline or tasks.from, and the manifest has neither")
    known = [task["name"] for task in spec["inline"]]
    for name in names:
        if not fnmatch.filter(known, name):
            raise CommandError(f"--task {name}: no task in tasks.inline has that name.{did_you_mean(name, known)}")
    chosen = [t for t in spec["inline"] if not names or any(fnmatch.fnmatchcase(t["name"], name) for name in names)]
    return {**spec, "inline": chosen[:limit]}


def _model(model: dict[str, Any], url: str | None, name: str | None, key_env: str | None) -> dict[str, Any]:
    endpoint = dict(model.get("endpoint") or {})
    if url:
        endpoint["baseURL"] = url
    if name:
        endpoint["name"] = name
    if key_env:
        endpoint["apiKeyFrom"] = {"env": key_env}
    for field, option in (("baseURL", "--model-url"), ("name", "--model-name")):
        if field not in endpoint:
            raise CommandError(
                f"{option} is missing, and the manifest has no model.endpoint.{field}; give {option} too"
            )
    return {field: value for field, value in model.items() if field not in _REPLACED} | {"endpoint": endpoint}

"""Results of build steps in object storage: `builds/KEY.json` next to the runs, each naming a layer (layers.py).

A step is an instruction of a Dockerfile, or the setup of a task. A key is a digest of everything that a step depends on,
the step below it included. So equal steps of different tasks and jobs share one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from agent_runtime.recording.store import Store
from rollout_api.base import ApiModel
from rollout_api.records import Layer

FOLDER: Final = "builds"
SUFFIX: Final = ".json"

RENEWED_SECONDS: Final = 24 * 3600.0
"""An entry that is older than this is written again when it is used, so that its time tells its last use to a day."""


class BuildEntry(ApiModel):
    """The result of one step."""

    layer: Layer
    step: str
    """The instruction, or `setup:` with the commands of a task's setup."""
    below: str | None = None
    """Key of the step below."""
    over: str
    """Digest of the layers that it was made over, and of those that it copied from. It counts only over these: two builders
    of one step make different layers, and what was made over one does not fit over the other.
    """
    image: str
    """The image at the bottom; empty for a machine's own root."""
    seconds: float
    """How long it took."""
    created: float
    """Unix time."""


@dataclass(frozen=True)
class StoredStep:
    """An entry with its key, and the Unix time of its last use, to a day."""

    key: str
    entry: BuildEntry
    used: float


def key_of_entry(key: str) -> str:
    """Return the storage key of a step's entry, relative to the output."""
    return f"{FOLDER}/{key}{SUFFIX}"


def parse_entry(data: bytes) -> BuildEntry | None:
    """Return the entry; None if it is damaged, which means that the step is built again."""
    try:
        return BuildEntry.model_validate_json(data)
    except ValidationError:
        return None


async def stored_steps(output: Store) -> Sequence[StoredStep]:
    """Return all steps of an output, the least recently used first. Damaged entries are left out."""
    objects = [meta for meta in await output.list(FOLDER) if meta.key.endswith(SUFFIX)]
    contents = await output.get_all([meta.key for meta in objects])
    found = [
        StoredStep(meta.key.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX), entry, meta.modified)
        for meta, data in zip(objects, contents, strict=True)
        if data is not None and (entry := parse_entry(data)) is not None
    ]
    return sorted(found, key=lambda step: (step.used, step.key))


def unused_steps(
    steps: Sequence[StoredStep], *, now: float, older_than_seconds: float | None, most_bytes: int | None
) -> Sequence[StoredStep]:
    """Return the steps to forget: those that were last used longer ago, and the least recently used ones until the rest
    takes at most `most_bytes`. A layer of several steps counts once. Pure.
    """
    kept = [step for step in steps if older_than_seconds is None or now - step.used <= older_than_seconds]
    if most_bytes is not None:
        sizes = {step.entry.layer.digest: step.entry.layer.bytes for step in kept}
        total, allowed = 0, []
        for step in reversed(kept):
            total += sizes.pop(step.entry.layer.digest, 0)
            if total <= most_bytes:
                allowed.append(step)
        kept = allowed
    keys = {step.key for step in kept}
    return [step for step in steps if step.key not in keys]

"""SWE-bench predictions: the patch of every graded rollout, in its harness's format."""

import re
from typing import Any, Final

from agent_runtime.recording.artifacts import open_artifacts
from agent_runtime.recording.messages import model_of
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Outcome, Record

PATCH_NAME: Final = ".rollout-patch/model.patch"
"""Name of the patch in the artifacts of a repository task."""

PATCH_BYTES: Final = 64 << 20
"""Largest exported patch, which the policy wrote. A larger one is exported as empty."""

_BRANCH = re.compile(r"(@\d+\.\d+)+$")
"""What the names of branches have after the name of the task, once for each branch of a branch."""


async def prediction(run: RunReader, index: int) -> list[dict[str, Any]]:
    """Return `{instance_id, model_name_or_path, model_patch}` of a rollout; nothing if it was lost to infrastructure.

    The patch is the one that was graded. The rollouts of an instance have different model names, because the harness
    takes one prediction of an instance for each name. Raises RecordCorrupt.
    """
    result = run.seals[index].result
    if result.outcome is not Outcome.COMPLETED:
        return []
    records = await run.records(index)
    tasks, member = run.job.spec.tasks, f"-{result.member}" if run.job.spec.group_size > 1 else ""
    # A stream and branches may have several groups of an instance.
    number = f"-{index}" if tasks.stream is not None or tasks.branch is not None else member
    return [
        {
            "instance_id": result.task if result.branched_from is None else _BRANCH.sub("", result.task),
            "model_name_or_path": f"{model_of(records) or run.job.spec.agent.type}{number}",
            "model_patch": (await _patch(run, records)).decode(errors="replace"),
        }
    ]


async def _patch(run: RunReader, records: list[Record]) -> bytes:
    async with open_artifacts(run.store, records) as archive:
        member = next((entry for entry in archive or () if entry.name == PATCH_NAME), None)
        if archive is None or member is None:
            return b""
        try:
            content = archive.extractfile(member)
        # the policy may have stored a link to itself, or to a missing file
        except (KeyError, RecursionError):
            return b""
        # The size of a link is not that of the file that it names.
        patch = b"" if content is None else content.read(PATCH_BYTES + 1)
        return patch if len(patch) <= PATCH_BYTES else b""

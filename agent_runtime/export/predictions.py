"""SWE-bench predictions: the patch of every graded rollout, as its harness takes them."""

import tarfile
import tempfile
from typing import Any, Final

from agent_runtime.recording.artifacts import unpacked
from agent_runtime.recording.reader import RunReader
from agent_runtime.recording.segments import RecordCorrupt
from rollout_api.records import ArtifactsRecord, Outcome, ResponseRecord

PATCH_NAME: Final = ".rollout-patch/model.patch"
"""What the artifacts of a repository task hold."""

PATCH_BYTES: Final = 64 << 20
"""Largest patch that is exported; what it holds was made by the policy. Beyond, it is an empty one."""

IN_MEMORY_BYTES: Final = 1 << 20


async def prediction(run: RunReader, index: int) -> list[dict[str, Any]]:
    """`{instance_id, model_name_or_path, model_patch}` of a rollout; nothing for one that was lost to infrastructure.

    The patch is the one that was graded. Members of a group have names of their own, since the harness takes one
    prediction of an instance for each name. Raises RecordCorrupt.
    """
    result = run.seals[index].result
    if result.outcome is not Outcome.COMPLETED:
        return []
    records = await run.records(index)
    artifacts = next((record for record in records if isinstance(record, ArtifactsRecord)), None)
    name = next((record.model for record in records if isinstance(record, ResponseRecord) and record.model), None)
    member = f"-{result.member}" if run.job.spec.group_size > 1 else ""
    patch = b"" if artifacts is None else await _patch(run, artifacts)
    return [
        {
            "instance_id": result.task,
            "model_name_or_path": f"{name or run.job.spec.agent.type}{member}",
            "model_patch": patch.decode(errors="replace"),
        }
    ]


async def _patch(run: RunReader, artifacts: ArtifactsRecord) -> bytes:
    key = artifacts.key
    if key is None:
        return b""
    with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file:
        async for chunk in unpacked(key, run.store.stream(key), artifacts.bytes):
            file.write(chunk)
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                member = next((entry for entry in archive if entry.name == PATCH_NAME), None)
                if member is None or member.size > PATCH_BYTES:
                    return b""
                content = archive.extractfile(member)
                return b"" if content is None else content.read()
        except (KeyError, RecursionError):  # the policy put a link there, to what is not carried, or back to itself
            return b""
        except tarfile.TarError as error:
            raise RecordCorrupt(key, f"it is no tar of artifacts ({error})") from error

"""Artifacts come from the policy: they are returned exactly, and cannot fill the runner's memory."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.artifacts import FRAME_BYTES, ArtifactsTooLarge, Packer, unpacked
from agent_runtime.recording.segments import RecordCorrupt


async def pieces(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def pack(chunks: list[bytes]) -> tuple[bytes, int]:
    packer = Packer(pieces(chunks), limit=1 << 30)
    return b"".join([piece async for piece in packer.packed()]), packer.size


async def unpack(packed: bytes, size: int, step: int = 1 << 16) -> list[bytes]:
    parts = [packed[start : start + step] for start in range(0, len(packed), step)]
    return [piece async for piece in unpacked("k", pieces(parts), size)]


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 50))
async def test_artifacts_are_restored_from_any_chunks(chunks: list[bytes], step: int) -> None:
    packed, size = await pack(chunks)
    assert b"".join(await unpack(packed, size, step)) == b"".join(chunks)


async def test_a_gigabyte_of_zeros_does_not_unpack_at_once() -> None:
    packed, size = await pack([bytes(16 << 20)] * 4)
    assert len(packed) < 100_000
    assert max(len(piece) for piece in await unpack(packed, size, step=len(packed))) <= FRAME_BYTES


async def test_artifacts_over_the_limit_are_refused_with_the_field_to_change() -> None:
    packer = Packer(pieces([b"x" * 600, b"x" * 600]), limit=1000)
    with pytest.raises(ArtifactsTooLarge, match=r"verifier.artifactsLimit, 1000 bytes"):
        [piece async for piece in packer.packed()]


@given(st.data())
async def test_truncated_artifacts_are_never_graded_as_if_they_were_whole(data: st.DataObject) -> None:
    packed, size = await pack([bytes(range(256)) * 6000])
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(RecordCorrupt, match="k: "):
        await unpack(packed[:cut], size)

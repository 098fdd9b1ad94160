"""Restored layers of a sandbox: each is made once, and the ones needed longest ago are removed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent_runtime.sandboxes.base import SandboxFailure, StoredLayer
from agent_runtime.sandboxes.prepare import LayerStates


async def nothing() -> AsyncIterator[bytes]:
    """Yield nothing, as the content of a layer that no test reads."""
    pieces: tuple[bytes, ...] = ()
    for piece in pieces:
        yield piece


def layers(*digests: str) -> list[StoredLayer]:
    return [StoredLayer(digest, 10, nothing) for digest in digests]


class Sandbox:
    """Records what is made and dropped."""

    def __init__(self, most_bytes: int = 1000) -> None:
        self.there: dict[str, tuple[str | None, str]] = {}
        self.made: list[str] = []
        self.fails = 0
        self.states = LayerStates(self.make, self.drop, most_bytes)

    async def make(self, name: str, below: str | None, layer: StoredLayer, is_bare: bool) -> None:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise SandboxFailure("LayerLost", "damaged")
        assert name not in self.there
        assert below is None or below in self.there
        self.there[name] = below, layer.digest
        self.made.append(layer.digest)

    async def drop(self, name: str) -> None:
        assert name not in [below for below, _ in self.there.values()], "a layer below others is not dropped"
        await asyncio.sleep(0)
        del self.there[name]

    async def ready(self, *digests: str) -> None:
        async with self.states.ready(layers(*digests)) as name:
            assert (name is None) == (not digests)
            assert name is None or self.there[name][1] == digests[-1]

    @property
    def kept(self) -> list[str]:
        return sorted(digest for _, digest in self.there.values())


async def test_layers_that_stages_share_are_made_once() -> None:
    sandbox = Sandbox()
    await asyncio.gather(
        sandbox.ready("a", "b"), sandbox.ready("a", "c"), sandbox.ready("a", "b", "d"), sandbox.ready()
    )
    assert sorted(sandbox.made) == ["a", "b", "c", "d"]


async def test_same_layer_over_another_one_is_a_different_state() -> None:
    sandbox = Sandbox()
    await sandbox.ready("a", "x")
    await sandbox.ready("b", "x")
    assert sandbox.made == ["a", "x", "b", "x"]


async def test_layers_needed_longest_ago_are_removed_from_the_top() -> None:
    sandbox = Sandbox(most_bytes=30)
    await sandbox.ready("a", "b")
    await sandbox.ready("a", "c")
    await sandbox.ready("a", "d")
    assert sandbox.kept == ["a", "c", "d"]
    await sandbox.ready("e", "f")
    assert sandbox.kept == ["a", "e", "f"]
    await sandbox.ready("a", "b")
    assert sandbox.kept == ["a", "b", "e"]


async def test_layers_in_use_are_kept_over_the_limit() -> None:
    sandbox = Sandbox(most_bytes=0)
    async with sandbox.states.ready(layers("a", "b")):
        await sandbox.ready("c")
        assert sandbox.kept == ["a", "b"]
    assert sandbox.kept == []


async def test_layer_that_is_needed_again_while_it_is_removed_is_made_again() -> None:
    sandbox = Sandbox(most_bytes=0)
    await asyncio.gather(*(sandbox.ready("a", "b") for _ in range(5)))
    await sandbox.ready("a", "b")
    assert sandbox.kept == []


async def test_failure_reaches_its_callers_and_the_next_one_tries_again() -> None:
    sandbox = Sandbox()
    sandbox.fails = 1
    with pytest.raises(SandboxFailure):
        await sandbox.ready("a", "b")
    await sandbox.ready("a", "b")
    assert sandbox.made == ["a", "b"]


async def test_cancelled_caller_does_not_end_the_work_of_others() -> None:
    sandbox = Sandbox()
    first = asyncio.create_task(sandbox.ready("a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(sandbox.ready("a"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert sandbox.made == ["a"]

"""Options of `python -m examples.train.laptop`."""

import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.train import lake, laptop
from examples.train.trainer import Settings


async def test_laptop_training_gets_the_options_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Settings] = []

    @contextlib.asynccontextmanager
    async def no_server() -> AsyncIterator[str]:
        yield "http://127.0.0.1:1"

    async def learn(url: str, output: Path, settings: Settings, seed: int) -> None:
        given.append(settings)

    monkeypatch.setattr(laptop, "server_process", no_server)
    monkeypatch.setattr(laptop, "learn", learn)
    await laptop._main(Namespace(slippery=False, updates=3, learning_rate=2.0, seed=0, output=Path("out")))
    assert given == [Settings(updates=3, learning_rate=2.0, tiles=lake.MAP)]

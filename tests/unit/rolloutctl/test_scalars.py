import dataclasses
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event as Point

from agent_runtime.engine.events import Event, GroupFinished
from rollout_api.records import Outcome, Result
from rolloutctl.errors import CommandError
from rolloutctl.ui.scalars import ScalarLog


def finished(group: int, reward: float) -> GroupFinished:
    result = Result(
        index=group,
        group=group,
        member=0,
        task="t",
        mode="Eval",
        seed=0,
        outcome=Outcome.COMPLETED,
        reward=reward,
        attempt=0,
    )
    return GroupFinished(group, "t", (result,))


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, option: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    targets: dict[str, Any] = {"tensorboard": None, "wandb": None, option: Path("x")}
    with pytest.raises(CommandError, match=f"--{option} needs {package}, which is not installed"):
        ScalarLog(lambda event: None, "job", **targets)


def points(folder: Path) -> list[tuple[int, str, float]]:
    """Return TensorBoard's data: records of a length, its checksum, the bytes, their checksum (TensorFlow's TFRecord)."""
    [file] = folder.iterdir()
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        point = Point.FromString(data[12 : 12 + length])
        found += [(point.step, value.tag, value.simple_value) for value in point.summary.value]
        data = data[16 + length :]
    return found


def test_resumed_run_continues_its_curve(tmp_path: Path) -> None:
    seen: list[Event] = []
    earlier = dataclasses.replace(finished(0, 1.0), earlier=True)
    with ScalarLog(seen.append, "job", tensorboard=tmp_path, wandb=None) as log:
        for event in (earlier, finished(1, 0.5), finished(2, 0.25)):
            log(event)
    assert len(seen) == 3, "the display behind it gets every event"
    rewards = [(step, value) for step, tag, value in points(tmp_path / "job") if tag == "rollout/reward"]
    assert rewards == [(2, 0.5), (3, 0.25)]

import struct
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboardX.proto.event_pb2 import Event as Point
from tensorboardX.proto.event_pb2 import SessionLog

from agent_runtime.engine.events import Event, GroupFinished, JobStarted
from rollout_api.records import Outcome, Result
from rolloutctl.errors import CommandError
from rolloutctl.ui.scalars import ScalarLog


def result(group: int, reward: float, ended: float = 0.0) -> Result:
    return Result(
        index=group,
        group=group,
        member=0,
        task="t",
        mode="Eval",
        seed=0,
        outcome=Outcome.COMPLETED,
        reward=reward,
        attempt=0,
        ended=ended,
    )


def finished(group: int, reward: float, *, earlier: bool = False) -> GroupFinished:
    return GroupFinished(group, "t", (result(group, reward),), earlier)


def started(folder: str, *results: Result) -> JobStarted:
    return JobStarted("job", folder, f"out/{folder}", 3, len(results), bool(results), results=results)


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, option: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    targets: dict[str, Any] = {"tensorboard": None, "wandb": None, option: Path("x")}
    with pytest.raises(CommandError, match=f"--{option} needs {package}, which is not installed"):
        ScalarLog(lambda event: None, 1, **targets)


def points(folder: Path) -> list[tuple[int, float]]:
    """Return the steps and rewards that TensorBoard shows of a run. Its data are records of a length, its checksum, the
    bytes, their checksum (TensorFlow's TFRecord).
    """
    shown: list[tuple[int, float]] = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            point = Point.FromString(data[12 : 12 + length])
            if point.session_log.status == SessionLog.START:
                shown = [(step, value) for step, value in shown if step < point.step]
            shown += [
                (point.step, value.simple_value) for value in point.summary.value if value.tag == "rollout/reward"
            ]
            data = data[16 + length :]
    return shown


def test_each_run_has_its_own_curve(tmp_path: Path) -> None:
    for folder, reward in (("job-1", 0.5), ("job-2", 0.25)):
        seen: list[Event] = []
        with ScalarLog(seen.append, 1, tensorboard=tmp_path, wandb=None) as log:
            log(started(folder))
            log(finished(0, reward))
        assert len(seen) == 2, "the display behind it gets every event"
    assert (points(tmp_path / "job-1"), points(tmp_path / "job-2")) == ([(1, 0.5)], [(1, 0.25)])


def test_resumed_run_has_each_point_once_in_the_order_of_the_ends(tmp_path: Path) -> None:
    with ScalarLog(lambda event: None, 1, tensorboard=tmp_path, wandb=None) as log:
        log(started("job-1"))
        log(finished(2, 0.25))
    (written,) = (tmp_path / "job-1").iterdir()
    # A second process in the same second would use the same file.
    written.rename(written.with_name(f"{written.name.rpartition('.')[0]}.0"))
    # The first process was killed before it wrote the point of group 1.
    with ScalarLog(lambda event: None, 1, tensorboard=tmp_path, wandb=None) as log:
        log(started("job-1", result(1, 0.5, ended=20.0), result(2, 0.25, ended=10.0)))
        for event in (finished(0, 1.0), finished(1, 0.5, earlier=True), finished(2, 0.25, earlier=True)):
            log(event)
    assert points(tmp_path / "job-1") == [(1, 0.25), (2, 0.5), (3, 1.0)]


def test_resumed_run_of_wandb_gets_only_the_steps_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(step=2)
    wandb = mock.Mock(init=mock.Mock(return_value=run))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with ScalarLog(lambda event: None, 1, tensorboard=None, wandb="p") as log:
        log(started("job-1", result(0, 0.5, ended=1.0), result(1, 0.25, ended=2.0)))
        log(finished(2, 1.0))
    wandb.init.assert_called_once_with(project="p", name="job-1", id="job-1", resume="allow")
    assert [(call.kwargs["step"], call.args[0]["rollout/reward"]) for call in run.log.call_args_list] == [
        (2, 0.25),
        (3, 1.0),
    ]
    run.finish.assert_called_once_with()

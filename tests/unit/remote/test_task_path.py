"""Where a row's task is searched, and in what order."""

from pathlib import Path

import pytest

from agent_runtime.integrations.harbor_server.rows import HarborRows, NoTask, roots_of, task_path
from tests.support.harbor_tasks import write_folder


def test_task_folder_is_searched_in_the_row_then_the_roots_then_the_template(tmp_path: Path) -> None:
    own, first, second, last = (tmp_path / name / "t1" for name in ("own", "first", "second", "last"))
    template = str(tmp_path / "last" / "{instance_id}")
    roots = [tmp_path / "first", tmp_path / "second"]
    for folder in (last, second, first, own):
        folder.mkdir(parents=True)
        assert task_path("t1", str(own), roots, template) == folder


def test_roots_are_from_the_configuration_and_the_environment_without_duplicates() -> None:
    config = {"data": {"train_harbor_dir": "/a", "val_harbor_dir": "/b"}}

    assert roots_of(config, {"HARBOR_DATASET_DIRS": "/c:/a, /d"}) == [Path("/a"), Path("/b"), Path("/c"), Path("/d")]


def test_missing_task_folder_is_reported_with_the_searched_paths(tmp_path: Path) -> None:
    with pytest.raises(NoTask, match=f"{tmp_path}/r/t1.*HARBOR_DATASET_DIRS"):
        task_path("t1", None, [tmp_path / "r"], None)


@pytest.mark.parametrize("instance", ["../secret", "/etc", "a/../../b"])
def test_a_dataset_cannot_name_a_folder_outside_of_the_roots(tmp_path: Path, instance: str) -> None:
    with pytest.raises(NoTask, match="is not inside"):
        task_path(instance, None, [tmp_path], "/{instance_id}")


def test_row_that_names_a_folder_of_tasks_is_refused(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        write_folder(tmp_path / "group" / name, {"task.toml": "", "instruction.md": "Work.", "tests/test.sh": ""})
    rows = HarborRows({"data": {"train_harbor_dir": str(tmp_path)}}, {}, None)
    with pytest.raises(NoTask, match=r"group is not the folder of a task: it has no task\.toml"):
        rows.task({"instance_id": "group"})
    task = rows.task({"instance_id": "group/beta"})
    assert task is not None
    assert task.name == "beta"

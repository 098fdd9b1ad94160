"""`rolloutctl gc` deletes runs of the given job or folder, and nothing else that is stored beside them."""

import asyncio
from pathlib import Path

import pytest

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.store import Store
from rollout_api.manifest import load_manifest
from rollout_api.tasks import Task
from rolloutctl.commands.gc import gc
from rolloutctl.errors import CommandError
from rolloutctl.ui.console import Form

MANIFEST = """
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {{name: {name}}}
spec:
  mode: Eval
  tasks: {{inline: [{{name: t, prompt: p}}]}}
  agent: {{type: Nop}}
  output: {{uri: out}}
"""


def finished_run(output: Path, name: str) -> str:
    """Return the folder of a new run of that job with one rollout."""
    manifest = output.parent / f"{name}.yaml"
    manifest.write_text(MANIFEST.format(name=name))

    async def begin() -> str:
        tasks = [Task(name="t", prompt="p")]
        record = await JobRecord.open(Store.open(str(output), {}), load_manifest(manifest), tasks, new=True)
        await record.store.put("seals/0.json", b"{}")
        await record.store.put("results.jsonl", b"")
        return record.folder

    return asyncio.run(begin())


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default output folder, with one run of each of two jobs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("mine", "runs-20261123"):
        finished_run(tmp_path / "out", name)
    return tmp_path / "out"


def left(output: Path) -> list[str]:
    return sorted(folder.name.rpartition("-")[0] for folder in output.iterdir())


@pytest.mark.parametrize("reference", ["name", "manifest", "folder name", "folder", "URI"])
def test_gc_deletes_only_runs_of_the_job_or_run_that_is_named(output: Path, reference: str) -> None:
    folder = next(output.glob("mine-*"))
    where = {
        "name": "mine",
        "manifest": "mine.yaml",
        "folder name": folder.name,
        "folder": str(folder),
        "URI": folder.as_uri(),
    }[reference]
    gc(where, None, 0, delete=True, form=Form.TEXT)
    assert left(output) == ["runs-20261123"]


def test_gc_counts_newer_runs_of_the_job_when_one_run_is_named(output: Path) -> None:
    folder = next(output.glob("mine-*"))
    gc(str(folder), None, 1, delete=True, form=Form.TEXT)
    assert folder.is_dir(), "the newest of its name"
    finished_run(output, "mine")
    gc(str(folder), None, 1, delete=True, form=Form.TEXT)
    assert not folder.is_dir()
    assert left(output) == ["mine", "runs-20261123"]


def test_gc_of_a_misspelt_name_deletes_nothing_and_reports_it(output: Path) -> None:
    with pytest.raises(CommandError, match="out contains no run of 'mien'; nothing was deleted"):
        gc("mien", None, 0, delete=True, form=Form.TEXT)
    assert left(output) == ["mine", "runs-20261123"]


def test_gc_of_a_folder_of_runs_includes_all_jobs(output: Path) -> None:
    looks_like_a_run = output.rename(output.parent / "runs-20261123")
    output.mkdir()
    finished_run(output, "beside")
    gc(looks_like_a_run.as_uri(), None, 0, delete=True, form=Form.TEXT)
    assert left(looks_like_a_run) == []
    assert left(output) == ["beside"]

"""Reading task folders of Terminal-bench 1."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks
from agent_runtime.tasks.folders import tags_of
from rollout_api.tasks import Tasks, VerifierMode
from tests.support.harbor_tasks import terminal_bench


def load(folder: Path) -> LoadedTasks:
    form = {"from": {"uri": str(folder), "format": "TerminalBench"}, "imageTemplate": "r/{name}:{digest}"}
    return load_tasks(Tasks.model_validate(form), folder, {})


def test_a_folder_is_a_task_with_its_limits_and_hidden_tests(tmp_path: Path) -> None:
    loaded = load(terminal_bench(tmp_path / "hello"))
    (task,) = loaded.tasks
    assert not loaded.warnings
    assert (task.timeouts.agent_seconds, task.timeouts.verifier_seconds, task.sandbox.working_dir) == (60, 120, "/app")
    assert task.tags == ["file", "easy"]
    assert task.verifier is not None
    assert {file.path for file in task.verifier.files} == {"/tests/run-tests.sh", "/tests/test_outputs.py"}
    assert task.verifier.mode is VerifierMode.SHARED
    assert [variable.name for variable in task.sandbox.env] == ["TEST_DIR", "GREETING"]
    assert task.sandbox.image is not None
    assert task.sandbox.image.startswith("r/hello:")


@pytest.mark.parametrize(
    ("described", "tags"),
    [
        ({"tags": ["a", 1], "category": "c", "difficulty": "easy"}, ["a", "1", "c", "easy"]),
        ({"tags": "math", "category": None}, ["math"]),
        ({"tags": None, "difficulty": ""}, []),
    ],
    ids=["list", "text", "empty"],
)
def test_tags_of_a_description_are_texts(described: dict[str, Any], tags: list[str]) -> None:
    assert tags_of(described) == tags


def test_unsupported_part_is_reported(tmp_path: Path) -> None:
    compose = "services:\n  client:\n    build: .\n    privileged: true\n"
    folder = terminal_bench(
        tmp_path / "t", "run_tests_in_same_shell: true\nunheard: 1\n", **{"docker-compose.yaml": compose}
    )
    told = "\n".join(map(str, load(folder).warnings))
    for part in ("task.yaml:9: run_tests_in_same_shell", "task.yaml:10: unheard", "services.client.privileged"):
        assert part in told


def test_single_service_gives_the_working_dir_whatever_its_name(tmp_path: Path) -> None:
    compose = "services:\n  agent:\n    build: .\n    working_dir: /data\n    tty: true\n    stdin_open: true\n"
    folder = terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})
    loaded = load(folder)
    assert loaded.tasks[0].sandbox.working_dir == "/data"
    assert not [warning for warning in loaded.warnings if "services.agent" in str(warning)]


BROKEN = {
    "task.yaml:2: is not YAML": {"task.yaml": "a: 1\n b: ]"},
    "instruction: is missing": {"task.yaml": "difficulty: easy"},
    "parser_name: 'swebench' is not supported": {"task.yaml": "instruction: x\nparser_name: swebench"},
    "max_test_timeout_sec: is 0, expected seconds": {"task.yaml": "instruction: x\nmax_test_timeout_sec: 0"},
    "run-tests.sh: has Windows line ends": {"run-tests.sh": b"#!/bin/bash\r\npytest\r\n"},
    "needs db in addition to client, which needs tasks.dockerfiles": {
        "docker-compose.yaml": "services:\n  client: {}\n  db: {}\n"
    },
}


@pytest.mark.parametrize(("message", "files"), BROKEN.items(), ids=BROKEN)
def test_folder_that_cannot_be_a_task_gives_the_reason(
    message: str, files: dict[str, str | bytes], tmp_path: Path
) -> None:
    with pytest.raises(TaskSourceError) as caught:
        load(terminal_bench(tmp_path / "t", **files))
    assert message in str(caught.value)

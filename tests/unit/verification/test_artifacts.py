"""What a verifier's commands say of who decides its verdict."""

import pytest

from agent_runtime.grading.artifacts import loads_agents_work, starts_tools
from rollout_api.tasks import Task, TaskVerifier


@pytest.mark.parametrize(
    ("command", "script", "expected"),
    [
        ("make check", "", True),
        ("cd build && ctest -V", "", True),
        ("CI=1 node_modules/.bin/jest --ci", "", True),
        ("sh tests/run.sh", "set -e\ncd /workspace; cargo nextest run", True),
        ("./gradlew test", "", True),
        ("python3 -m mypy --strict calc.py", "", True),
        ("sh tests/run.sh", "# make sure that it is there\ncmp answer.txt expected.txt", False),
        ("python3 -P tests/make.py --make=1 go.mod", "", False),
        ("pytest tests/test_a.py", "diff -r out node-expected", False),
    ],
)
def test_verifiers_that_start_tools_which_load_what_agents_left(command: str, script: str, expected: bool) -> None:
    files = [{"path": "tests/run.sh", "content": script}] if script else []
    spec = TaskVerifier.model_validate({"kind": "commands", "commands": [command], "files": files})
    assert starts_tools(spec) is expected


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ("./check", {"LD_LIBRARY_PATH": "/opt/lib:/app/lib"}, True),
        ("./check", {"LD_LIBRARY_PATH": ":/opt/lib"}, True),
        ("./check", {"PERL5LIB": "lib"}, True),
        ("./check", {"HOME": "/app"}, True),
        ("./check", {"HOME": "/data/out/home"}, True),
        ("./check", {"HOME": "/root", "LD_LIBRARY_PATH": "/usr/lib:/application"}, False),
        ("cd build && LD_LIBRARY_PATH=$PWD ./check", {}, True),
        ("sh /tests/run.sh", {}, True),
        ('export HOME="$(mktemp -d)" LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH; ./check', {}, False),
    ],
)
def test_verifiers_whose_programs_load_what_agents_left(
    command: str, variables: dict[str, str], expected: bool
) -> None:
    script = {"path": "/tests/run.sh", "content": "BASH_ENV=/app/env.sh bash -c true"}
    verifier = {
        "commands": [command],
        "artifacts": [".", "/data/out"],
        "files": [script] if "run.sh" in command else [],
    }
    task = Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier})
    assert loads_agents_work(task, "/app", variables) is expected

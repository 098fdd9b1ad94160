"""What a verifier's commands say of who decides its verdict."""

import pytest

from agent_runtime.grading.artifacts import starts_tools
from rollout_api.tasks import TaskVerifier


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

"""`R2E`: instances of R2E-Gym, one in each row. Each has an image with the repository in /testbed and the tests.

Columns as in the dataset `R2E-Gym/R2E-Gym-Subset`. A task is solved if every test that is PASSED in
`expected_output_json` is reported as passed; tests that fail even with the fix do not count.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from agent_runtime.tasks import repository
from agent_runtime.tasks.instance import Checked, read_instances
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks
from rollout_api.files import TaskFile
from rollout_api.tasks import Task, Timeouts

REQUIRED: Final = ("repo_name", "commit_hash", "docker_image", "problem_statement", "expected_output_json")
OPTIONAL: Final = ("instance_id", "parsed_commit_content", "patch", "working_dir")

WORKING_DIR: Final = "/testbed"
ENVIRONMENT: Final = ".venv/bin"
"""Python environment of the tests, which the images have in the repository but not on PATH."""
SEARCH_PATH: Final = "/root/.local/bin:/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

TIMEOUTS: Final = Timeouts(agent_seconds=3600, setup_seconds=1800, verifier_seconds=600)

_COLOR: Final = re.compile("\x1b\\[[0-9;]*m")
_PROGRAM: Final = resources.files("agent_runtime.tasks.in_sandbox").joinpath("sealed_tests.py").read_text("utf-8")
_PROGRAM_FILE: Final = TaskFile(path=f"{repository.TESTS_FOLDER}/sealed_tests.py", content=_PROGRAM)


def read(place: SourcePlace) -> LoadedTasks:
    """Return the tasks of a file of instances. Raises TaskSourceError with every invalid row."""
    return read_instances(place, REQUIRED, OPTIONAL, task_of)


def task_of(instance: Mapping[str, Any]) -> Task:
    """Return the task of an instance. Raises RowError with all its problems."""
    checked = Checked(instance)
    repo, commit = checked.text("repo_name"), checked.text("commit_hash")
    image, issue = checked.text("docker_image"), checked.text("problem_statement")
    expected = checked.text("expected_output_json")
    tests = _tests(checked, expected)
    patch = checked.patch("patch")
    before = _commit_before(checked)
    folder = checked.optional("working_dir") or WORKING_DIR
    checked.refuse()
    key = hashlib.sha256(f"{commit}\n{expected}".encode()).hexdigest()
    seal = f"python - seal {key} <<'END-OF-PROGRAM'\n{_PROGRAM}\nEND-OF-PROGRAM"
    opened = f"python {_PROGRAM_FILE.path} open {shlex.quote(key)} && {repository.reported('summary run_tests.sh')}"
    hidden = repository.hidden_files(repository.PREPARED, "", (), repository.patched_paths(patch))
    return repository.task_of_patch(
        name=checked.optional("instance_id") or f"{repo}-{commit}",
        repo=repo,
        issue=issue,
        setup=[seal, repository.scrub_history(*before, "HEAD")],
        patch=patch,
        verifier={
            "kind": "junit",
            "report": repository.REPORT,
            "commands": [f"{repository.APPLY_PATCH} && {opened}"],
            "tests": tests,
            "files": [*hidden, _PROGRAM_FILE, repository.REPORT_TESTS],
        },
        timeouts=TIMEOUTS,
        sandbox={
            "image": image,
            "workingDir": folder,
            "env": [{"name": "PATH", "value": f"{folder}/{ENVIRONMENT}:{SEARCH_PATH}"}],
        },
    )


def _tests(checked: Checked, expected: str) -> list[str]:
    """Return the tests that pass with the fix, as `report_tests.py summary` names them."""
    field = "expected_output_json"
    if not expected:
        return []
    try:
        found = json.loads(expected)
    except (ValueError, RecursionError) as error:
        checked.wrong(field, f"is text that is not JSON: {error}; expected an object of test names")
        return []
    if not isinstance(found, dict) or not all(isinstance(status, str) for status in found.values()):
        checked.wrong(field, "is not a JSON object of test names and PASSED or FAILED")
        return []
    plain = {_COLOR.sub("", name): status for name, status in found.items()}
    # Of names that become equal, R2E-Gym takes the status of the last one in order.
    results = {name.partition(" - ")[0]: plain[name] for name in sorted(plain)}
    tests = [name for name, status in results.items() if name and status == "PASSED"]
    if not tests:
        checked.wrong(field, "has no test that is PASSED: doing nothing would pass")
    return tests


def _commit_before(checked: Checked) -> list[str]:
    """Return the commit before the fix, if the row has it; images have it checked out."""
    text = checked.optional("parsed_commit_content")
    try:
        commit = json.loads(text)["old_commit_hash"] if text else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return []
    return [commit] if isinstance(commit, str) and re.fullmatch("[0-9a-f]{7,64}[~^]?", commit) else []

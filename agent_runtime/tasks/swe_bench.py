"""`SWEBench`: instances of SWE-bench and of sets in its form (SWE-Gym, SWE-rebench, …), one a row.

The columns are those of the data set `princeton-nlp/SWE-bench`; the image is its harness's for the instance, with the
repository in /testbed. Resolved means that all of FAIL_TO_PASS and PASS_TO_PASS are reported as passed.
"""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from agent_runtime.tasks import repository
from agent_runtime.tasks.lazy import check_columns, tasks_of_table
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks, TaskProblem, TaskSourceError
from agent_runtime.tasks.table import RowError, open_table
from rollout_api.manifest import explain, path_of
from rollout_api.tasks import Task

REQUIRED: Final = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
OPTIONAL: Final = ("patch", "version", "image", "image_name", "docker_image", "test_cmd")
FIELDS: Final = (*REQUIRED, *OPTIONAL)

WORKING_DIR: Final = "/testbed"
IMAGE: Final = "swebench/sweb.eval.x86_64.{name}:latest"
"""Where the images of SWE-bench's harness are published; `__` is written `_1776_` there, since Docker Hub refuses it."""

SHELL: Final = [{"name": "BASH_ENV", "value": "/root/.bashrc"}]
"""The harness's images activate the conda environment of the tests in that file, which bash reads for every command so."""

TEST_COMMAND: Final = "pytest -rA -p no:cacheprovider"
"""The program and not `python -m pytest`, which would put the repository's root before the standard library."""

TIMEOUTS: Final = {"agentSeconds": 3600, "setupSeconds": 1800, "verifierSeconds": 1800}
"""The verifier's is the harness's own default for one run of tests."""

_REQUIRED: Final = "which format SWEBench needs; name the one that has it in tasks.from.columns"
_COMMIT: Final = re.compile("[0-9a-f]{7,64}")

PROMPT: Final = """\
The working directory has the repository {repo}. Resolve this issue in it, in its source files. Hidden tests will judge the \
result; changes of existing tests do not count.

<issue>
{issue}
</issue>"""


def read(place: SourcePlace) -> LoadedTasks:
    """The tasks of a file of instances. Raises TaskSourceError with every broken row."""
    columns = {field: place.source.columns.get(field, field) for field in FIELDS}
    if unknown := [field for field in place.source.columns if field not in FIELDS]:
        message = f"tasks.from.columns: {unknown[0]!r} is no field of an instance; known are {', '.join(FIELDS)}"
        raise TaskSourceError([TaskProblem(place.uri, None, message)])
    table = open_table(place, {*columns.values(), *place.source.filter})
    named = [(column, f"named in tasks.from.columns.{field}") for field, column in place.source.columns.items()]
    required = [(field, _REQUIRED) for field in REQUIRED if columns[field] == field]
    check_columns(place, table, [*named, *required])
    template = place.image_template
    return tasks_of_table(
        place, table, lambda row: task_of({field: row.get(column) for field, column in columns.items()}, template)
    )


def task_of(instance: Mapping[str, Any], image_template: str | None = None) -> Task:
    """The task of an instance. Raises RowError with all that is wrong with it."""
    checked = Checked(instance)
    name, base = checked.text("instance_id"), checked.text("base_commit")
    if base and not _COMMIT.fullmatch(base):
        checked.wrong("base_commit", f"{base!r} is no commit id; expected 40 hexadecimal digits")
    patch, test_patch = checked.patch("patch"), checked.patch("test_patch")
    to_pass, to_keep = checked.names("FAIL_TO_PASS"), checked.names("PASS_TO_PASS")
    if not to_pass and "FAIL_TO_PASS" not in checked.messages:
        checked.wrong(
            "FAIL_TO_PASS", "is empty: doing nothing would be right; expected the tests that the fix makes pass"
        )
    repo, issue = checked.text("repo"), checked.text("problem_statement")
    if not test_patch:
        checked.wrong("test_patch", "is missing or empty: it has the tests that judge")
    checked.refuse()
    tests = [*to_pass, *to_keep]
    files = sorted({name.partition("::")[0] for name in tests if "::" in name})
    command = checked.optional("test_cmd") or TEST_COMMAND
    return valid(
        {
            "name": name,
            "prompt": PROMPT.format(repo=repo, issue=issue),
            "setup": [repository.scrub_history(base)],
            "solution": repository.solution(patch),
            "verifier": {
                "kind": "pytest",
                "commands": [f"{repository.APPLY_PATCH} && {command} {' '.join(map(shlex.quote, files))}"],
                "tests": tests,
                "files": repository.hidden_files(base, test_patch, files, repository.patched_paths(patch)),
                "collect": [repository.COLLECT_PATCH],
                "artifactsFolder": repository.PATCH_FOLDER,
                "reward": "AllOrNothing",
            },
            "timeouts": TIMEOUTS,
            "sandbox": {"image": image_of(instance, name, image_template), "workingDir": WORKING_DIR, "env": SHELL},
            "tags": [repo],
        }
    )


def image_of(instance: Mapping[str, Any], name: str, template: str | None) -> str:
    """The image of an instance: its own column, else the template's, else that of SWE-bench's harness."""
    given = instance.get("image") or instance.get("image_name") or instance.get("docker_image")
    if given:
        return str(given)
    if template is not None:
        return template.replace("{name}", name.lower())
    return IMAGE.replace("{name}", name.lower().replace("__", "_1776_"))


def valid(values: dict[str, Any]) -> Task:
    """The task with these fields. Raises RowError."""
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise RowError(
            [f"{path_of(place)}: {message}".removeprefix(": ") for place, message in explain(error, Task, values)]
        ) from None


class Checked:
    """The fields of an instance, and what is wrong with them."""

    def __init__(self, instance: Mapping[str, Any]) -> None:
        self._instance = instance
        self.messages: dict[str, str] = {}

    def wrong(self, field: str, message: str) -> None:
        """Note a problem; the first of a field counts."""
        self.messages.setdefault(field, message)

    def refuse(self) -> None:
        """Raise RowError where anything was wrong."""
        if self.messages:
            raise RowError([f"{field}: {message}" for field, message in self.messages.items()])

    def text(self, field: str) -> str:
        """A text that must be there."""
        value = self._instance.get(field)
        if value is None or value == "":
            self.wrong(field, "is missing or empty")
        elif not isinstance(value, str):
            self.wrong(field, f"is {json.dumps(value, default=str)[:60]}, expected text")
        else:
            return value
        return ""

    def optional(self, field: str) -> str:
        """A text that may be left out."""
        return self.text(field) if self._instance.get(field) not in (None, "") else ""

    def patch(self, field: str) -> str:
        """A patch that git wrote, or nothing."""
        patch = self.optional(field)
        if patch and not patch.startswith("diff --git ") and "\ndiff --git " not in patch:
            self.wrong(field, "is no patch that git wrote: expected lines that begin with 'diff --git'")
        return patch if patch.endswith("\n") or not patch else f"{patch}\n"

    def names(self, field: str) -> list[str]:
        """A list of test names, or the JSON of one."""
        value = self._instance.get(field)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                self.wrong(field, f"is text that is not JSON: {error}; expected a list of test names")
                return []
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            found = "is missing" if value is None else f"is {json.dumps(value, default=str)[:60]}"
            self.wrong(field, f"{found}; expected a list of test names")
            return []
        return value

"""`SWEBench`: instances of SWE-bench and of datasets in its format (SWE-Gym, SWE-rebench, …), one in each row.

The columns are those of the dataset `princeton-nlp/SWE-bench`; the image is its harness's for the instance, with the
repository in /testbed. Resolved means that all of FAIL_TO_PASS and PASS_TO_PASS are reported as passed.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Json, StringConstraints, Tag, ValidationError

from agent_runtime.tasks import repository
from agent_runtime.tasks.instance import Checked, Instance, read_instances
from agent_runtime.tasks.place import SourcePlace
from agent_runtime.tasks.problems import LoadedTasks
from rollout_api.base import ShortText, TaskName
from rollout_api.sandbox import EnvVar
from rollout_api.tasks import Task, Timeouts, UnpassedResult

CHARACTERS: Final = 30_000
"""Limit of the characters in an instance's texts except the issue, with a quote counted five times, as in shell
quoting. Below it, no derived value exceeds its own limit: commands have 65,536 characters, and a quoted path has at
most 1.5 times as many as its test's name; files have 204,800, and JSON needs at most six characters for an ASCII
character.
"""

_Issue = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
_Commit = Annotated[str, StringConstraints(pattern="^[0-9a-f]{7,64}$")]
_Patch = Annotated[str, StringConstraints(pattern=r"(^|\n)diff --git ")]
_Texts = Annotated[list[ShortText], Field(max_length=5_000)]  # two such lists are combined into one of at most 10,000
_Names = Annotated[
    Annotated[_Texts, Tag("list")] | Annotated[Json[_Texts], Tag("str")],
    Discriminator(lambda value: type(value).__name__),
]


class CommonInstance(BaseModel):
    """Validates the fields of an instance with usual values, so that its task is certainly valid. This takes a third of
    the time of creating the task. Other instances may be valid too, and are checked by creating their tasks.
    """

    model_config = ConfigDict(strict=True)

    instance_id: TaskName
    repo: ShortText
    base_commit: _Commit
    problem_statement: _Issue
    patch: _Patch | None = None
    test_patch: _Patch
    FAIL_TO_PASS: Annotated[_Names, Field(min_length=1)]
    PASS_TO_PASS: _Names
    image: ShortText | None = None
    image_name: ShortText | None = None
    docker_image: ShortText | None = None
    test_cmd: ShortText | None = None
    version: str | None = None
    working_dir: None = None

    @property
    def is_short(self) -> bool:
        """Whether no derived value can be too long."""
        text = "".join([self.patch or "", self.test_patch, self.test_cmd or "", *self.FAIL_TO_PASS, *self.PASS_TO_PASS])
        return text.isascii() and len(text) + 4 * text.count("'") <= CHARACTERS


def usual(instance: Instance) -> CommonInstance | None:
    """Return the instance if it is a common one."""
    try:
        found = CommonInstance.model_validate(instance)
    except ValidationError:
        return None
    return found if found.is_short and _reportable(found.FAIL_TO_PASS) else None


REQUIRED: Final = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
OPTIONAL: Final = ("patch", "image", "image_name", "docker_image", "test_cmd", "version", "working_dir")

WORKING_DIR: Final = "/testbed"
IMAGE: Final = "swebench/sweb.eval.x86_64.{name}:latest"
"""Registry name of the images of SWE-bench's harness; `__` is written `_1776_` there, because Docker Hub refuses it."""

IMAGE_CHARACTERS: Final = 1024
"""Limit of rollout_api.sandbox.SandboxOverrides.image."""

SHELL: Final = [EnvVar(name="BASH_ENV", value="/root/.bashrc")]
"""File in the harness's images that activates the conda environment of the tests; this makes bash read it for every
command.
"""

TEST_COMMAND: Final = "pytest -rA -p no:cacheprovider"
"""Not `python -m pytest`, which would put the repository's root before the standard library on the path."""

TIMEOUTS: Final = Timeouts(agent_seconds=3600, setup_seconds=1800, verifier_seconds=1800)
"""The verifier's limit is the harness's own default for one test run."""

_WITHOUT_PARALLEL: Final = frozenset({"1.7", "1.8", "1.9"})
"""Versions of Django for which SWE-bench's harness passes neither settings nor `--parallel`."""

_PROGRESS: Final = re.compile(r"\[ *[0-9]+%\]")
_COMMIT: Final = re.compile("[0-9a-f]{7,64}")


def read(place: SourcePlace) -> LoadedTasks:
    """Return the tasks of a file of instances. Raises TaskSourceError with every invalid row."""
    return read_instances(
        place,
        REQUIRED,
        OPTIONAL,
        make=lambda instance: task_of(instance, place.image_template),
        name_if_valid=lambda instance: name_if_valid(instance, place.image_template),
    )


def name_if_valid(instance: Mapping[str, Any], image_template: str | None = None) -> str | None:
    """Return the task's name if the instance is certainly valid (`CommonInstance`); otherwise None."""
    found = usual(instance)
    if found is None or len(image_of(instance, found.instance_id, image_template)) > IMAGE_CHARACTERS:
        return None
    return found.instance_id


def task_of(instance: Mapping[str, Any], image_template: str | None = None) -> Task:
    """Return the task of an instance. Raises RowError with all its problems."""
    checked = Checked(instance)
    name, base = checked.text("instance_id"), checked.text("base_commit")
    if base and not _COMMIT.fullmatch(base):
        checked.wrong("base_commit", f"{base!r} is not a commit id; expected 40 hexadecimal digits")
    patch, test_patch = checked.patch("patch"), checked.patch("test_patch")
    to_pass, to_keep = _reportable(checked.names("FAIL_TO_PASS")), _reportable(checked.names("PASS_TO_PASS"))
    if not to_pass and "FAIL_TO_PASS" not in checked.messages:
        checked.wrong(
            "FAIL_TO_PASS", "names no test: doing nothing would pass; expected the tests that the fix makes pass"
        )
    repo, issue = checked.text("repo"), checked.text("problem_statement")
    if not test_patch:
        checked.wrong("test_patch", "is missing or empty: it must contain the hidden tests")
    command, version, folder = (checked.optional(field) for field in ("test_cmd", "version", "working_dir"))
    checked.refuse()
    tests = [*to_pass, *to_keep]
    files, patched = files_of(tests), repository.patched_paths(test_patch)
    verifier = runner_of(repo, command, files, patched, version)
    hidden = repository.hidden_files(base, test_patch, {*files, *patched}, repository.patched_paths(patch))
    reporter = [repository.REPORT_TESTS] if verifier["kind"] == "junit" else []
    image = image_of(instance, name, image_template)
    return repository.task_of_patch(
        name=name,
        repo=repo,
        issue=issue,
        setup=[repository.scrub_history(base)],
        patch=patch,
        # As its harness does, so its lists may include such tests.
        verifier={**verifier, "tests": tests, "alsoPassed": [UnpassedResult.XFAIL], "files": [*hidden, *reporter]},
        timeouts=TIMEOUTS,
        sandbox={"image": image, "workingDir": folder or WORKING_DIR, "env": SHELL},
    )


def _reportable(tests: Sequence[str]) -> list[str]:
    """Return the tests without those that are no test, because no run can report them: SWE-bench's harness also reads
    pytest's lines of progress, `PASSED [100%]`, and some instances list that.
    """
    return [name for name in tests if not _PROGRESS.fullmatch(name)]


def runner_of(repo: str, command: str, files: Sequence[str], patched: Sequence[str], version: str) -> dict[str, Any]:
    """Return the first fields of a repository's verifier: how its tests are run, and how the results are read.

    `command`, if given, is pytest's with the repository's own options. Django and SymPy have their own runners, called
    as in SWE-bench's harness on the files that the test patch changes; all others use pytest, on `files`.
    """
    scripts = [path for path in dict.fromkeys(patched) if path.endswith(".py")]
    if repo == "django/django" and not command:
        labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in scripts]
        options = (
            "--verbosity 2" if version in _WITHOUT_PARALLEL else "--verbosity 2 --settings=test_sqlite --parallel 1"
        )
        return _reported("LANG=C.UTF-8 PYTHONIOENCODING=utf8", f"unittest tests/runtests.py {options}", labels)
    if repo == "sympy/sympy" and not command:
        return _reported("PYTHONHASHSEED=0", "sympy", scripts)
    command = " ".join([command or TEST_COMMAND, *map(shlex.quote, files)])
    return {"kind": "pytest", "commands": [f"{repository.APPLY_PATCH} && {command}"]}


def _reported(environment: str, runner: str, targets: Sequence[str]) -> dict[str, Any]:
    command = " ".join([f"{environment} {repository.reported(runner)}", *map(shlex.quote, targets)])
    return {"kind": "junit", "report": repository.REPORT, "commands": [f"{repository.APPLY_PATCH} && {command}"]}


def files_of(tests: Sequence[str]) -> list[str]:
    """Return the files of tests in pytest's format, `file::test`, each once."""
    files, known = set[str](), "\0"
    for name in tests:
        if not name.startswith(known) and "::" in name:  # usually all tests of a file follow one another
            file = name.partition("::")[0]
            files.add(file)
            known = f"{file}::"
    return sorted(files)


def image_of(instance: Mapping[str, Any], name: str, template: str | None) -> str:
    """Return the image of an instance: its own column, else the template's, else that of SWE-bench's harness."""
    given = instance.get("image") or instance.get("image_name") or instance.get("docker_image")
    if given:
        return str(given)
    if template is not None:
        return template.replace("{name}", name.lower())
    return IMAGE.replace("{name}", name.lower().replace("__", "_1776_"))

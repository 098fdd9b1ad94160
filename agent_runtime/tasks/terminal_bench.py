"""`TerminalBench`: unmodified task folders of Terminal-bench 1.

A folder has task.yaml, Dockerfile, docker-compose.yaml, run-tests.sh, tests/ and solution.sh. The
verdict is based on pytest's report: every test of the hidden files must pass.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from agent_runtime.dockerfiles.problems import facts_of
from agent_runtime.tasks.compose import ComposeReader
from agent_runtime.tasks.folders import Folder, FolderFormat, Notes, tags_of
from agent_runtime.tasks.images import built_image, job_dockerfile
from agent_runtime.tasks.place import SourcePlace
from rollout_api.files import TaskFile
from rollout_api.sandbox import EnvVar, Network, SandboxOverrides
from rollout_api.tasks import RewardRule, Task, TaskVerifier, Timeouts, UnpassedResult, VerifierKind, VerifierMode

CONFIG: Final = "task.yaml"
COMPOSE: Final = "docker-compose.yaml"
CLIENT: Final = "client"
"""The compose service in which agent and tests work."""
AGENT_SECONDS, TEST_SECONDS = 360.0, 60.0
"""Terminal-bench's defaults of `max_agent_timeout_sec` and `max_test_timeout_sec`."""
BUILD_SECONDS: Final = 1800.0
TESTS, ORACLE = "/tests", "/oracle"

_PEOPLE: Final = {"author_name", "author_email", "difficulty", "category", "tags"}
_ESTIMATES: Final = {"estimated_duration_sec", "expert_time_estimate_min", "junior_time_estimate_min"}
_SETTINGS: Final = {"instruction", "parser_name", "max_agent_timeout_sec", "max_test_timeout_sec", "disable_asciinema"}
HONOURED: Final = _PEOPLE | _ESTIMATES | _SETTINGS
REPORTED: Final[Mapping[str, str]] = {
    "run_tests_in_same_shell": "the tests run in a new shell, without the state of the agent's shell"
}
VARIABLES: Final = {
    "T_BENCH_TEST_DIR": TESTS,
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": CLIENT,
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": CLIENT,
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": CLIENT,
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
"""Variables that Terminal-bench sets for docker-compose.yaml."""


def _config(folder: Folder, notes: Notes) -> Mapping[str, Any] | None:
    try:
        config = yaml.safe_load(folder.text(CONFIG))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        notes.refuse(CONFIG, f"is not YAML: {getattr(error, 'problem', None) or error}", line)
        return None
    if not isinstance(config, dict):
        notes.refuse(CONFIG, "is not a mapping; expected at least instruction and difficulty")
        return None
    return config


def _columns(folder: Folder, notes: Notes) -> Mapping[str, Any]:
    return {**yaml.safe_load(folder.text(CONFIG)), "name": folder.name}


def _task(folder: Folder, notes: Notes, place: SourcePlace) -> Task | None:
    config = _config(folder, notes)
    if config is None:
        return None
    _judge_keys(folder, config, notes)
    instruction = config.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        notes.refuse(CONFIG, "instruction: is missing; it must contain the agent's instructions")
    if (parser := config.get("parser_name", "pytest")) != "pytest":
        notes.refuse(CONFIG, f"parser_name: {parser!r} is not supported, expected pytest; remove the task")
    if "run-tests.sh" not in folder.files:
        notes.refuse("run-tests.sh", "is missing; it grades the task")
    for script in {"run-tests.sh", "solution.sh"} & folder.files.keys():
        notes.check_script(folder, script)
    compose = ComposeReader(folder, notes, COMPOSE, CLIENT, place, VARIABLES, BUILD_SECONDS, has_any_name=True).read()
    working_dir = compose.working_dir
    dockerfile = compose.dockerfile
    if dockerfile is None and place.dockerfiles is not None:
        dockerfile = job_dockerfile(folder, notes, place.dockerfiles, context="", seconds=BUILD_SECONDS)
    facts = None
    if dockerfile is not None:
        facts = facts_of(dockerfile.text, dockerfile.args, dockerfile.target)
    elif "Dockerfile" in folder.files:
        facts = facts_of(folder.text("Dockerfile"), {}, None)
    working_dir = working_dir or (facts.working_dir if facts else None)
    # A Dockerfile that the job builds has the folder of its base image.
    if working_dir is None and (facts is None or place.dockerfiles is None):
        notes.report("Dockerfile", "has no readable WORKDIR: commands start in the job's sandbox.workingDir")
    agent, test = (
        _seconds(config, key, default, notes)
        for key, default in (("max_agent_timeout_sec", AGENT_SECONDS), ("max_test_timeout_sec", TEST_SECONDS))
    )
    if notes.problems:
        return None
    return Task(
        name=re.sub(r"[^A-Za-z0-9._@+=-]", "-", folder.name),
        prompt=str(instruction),
        solution=[f"bash {ORACLE}/solution.sh"] if "solution.sh" in folder.files else [],
        solution_files=[folder.as_file("solution.sh", f"{ORACLE}/solution.sh")]
        if "solution.sh" in folder.files
        else [],
        verifier=TaskVerifier(
            kind=VerifierKind.PYTEST,
            files=_tests(folder),
            commands=[f"bash {TESTS}/run-tests.sh"],
            # As Terminal-bench's own reader of pytest's output does.
            also_passed=[UnpassedResult.XFAIL, UnpassedResult.SKIPPED],
            env=[EnvVar(name="TEST_DIR", value=TESTS)],
            reward=RewardRule.ALL_OR_NOTHING,
            mode=VerifierMode.SHARED,
        ),
        timeouts=Timeouts(agent_seconds=agent, verifier_seconds=test),
        dockerfile=dockerfile,
        files=compose.files,
        services=compose.services,
        volumes=compose.volumes,
        sandbox=SandboxOverrides(
            image=built_image(
                folder,
                notes,
                place.image_template,
                context="",
                name=folder.name,
                seconds=BUILD_SECONDS,
                instead="the job's sandbox.image",
            )
            if place.dockerfiles is None
            else None,
            working_dir=working_dir,
            user=facts.user if facts else None,
            env=compose.env,
            network=Network(setup="Public", agent="Public", verifier="Public"),
        ),
        tags=tags_of(config),
    )


FORMAT: Final = FolderFormat(CONFIG, _columns, _task)


def _tests(folder: Folder) -> list[TaskFile]:
    return [folder.as_file("run-tests.sh", f"{TESTS}/run-tests.sh"), *folder.as_files("tests", TESTS)]


def _judge_keys(folder: Folder, config: Mapping[str, Any], notes: Notes) -> None:
    lines = folder.text(CONFIG).splitlines()
    for key in config:
        line = next((n for n, text in enumerate(lines, 1) if text.startswith(f"{key}:")), None)
        if key in REPORTED and config[key]:
            notes.report(CONFIG, f"{key} is not supported: {REPORTED[key]}", line)
        elif key not in HONOURED and key not in REPORTED:
            notes.report(
                CONFIG, f"{key} is not supported: it is not a key of Terminal-bench 1, which ignores it too", line
            )
    if "solution.sh" not in folder.files and "solution.yaml" in folder.files:
        notes.report(
            "solution.yaml", "is not supported: it is typed into a terminal; the Oracle agent needs solution.sh"
        )


def _seconds(config: Mapping[str, Any], key: str, default: float, notes: Notes) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 604_800:
        notes.refuse(CONFIG, f"{key}: is {value!r}, expected seconds from 1 to 604800")
        return 1
    return math.ceil(value)

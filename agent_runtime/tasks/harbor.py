"""`Harbor`: unmodified task folders of Harbor, schema 1.x.

task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh, steps/. The verifier writes
/logs/verifier/reward.json or reward.txt; tests are in /tests, the solution in /solution.
"""

import math
import posixpath
import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from agent_runtime.dockerfiles.problems import facts_of
from agent_runtime.tasks.compose import Compose, ComposeReader
from agent_runtime.tasks.folders import Folder, FolderFormat, Notes, tags_of, variable_missing
from agent_runtime.tasks.harbor_keys import handling_of, leaves, line_of
from agent_runtime.tasks.images import built_image, job_dockerfile
from agent_runtime.tasks.place import SourcePlace
from rollout_api.files import Dockerfile, TaskFile
from rollout_api.sandbox import EnvVar, Network, NetworkAccess, Resources, SandboxOverrides
from rollout_api.services import TaskService
from rollout_api.tasks import StepReward, Task, TaskStep, TaskVerifier, Timeouts, VerifierKind, VerifierMode

CONFIG: Final = "task.toml"
TESTS, SOLUTION, CONVENTION = "/tests", "/solution", "/logs/artifacts"
LOGS, MARK = ("/logs/agent", CONVENTION), ".rollout"

COMPOSE, MAIN = "environment/docker-compose.yaml", "main"
"""Services beside the agent's, and the name of the agent's own."""
NO_AGENT_LIMIT: Final = 86_400
"""Time limit of an agent without `timeout_sec`: a day, the lifetime of a sandbox. Harbor has no limit then."""
VERIFIER_SECONDS: Final = 600.0
BUILD_SECONDS: Final = 600.0
BUILD_NETWORK: Final = "Public"
ANY_BASH: Final = '"$(command -v bash || echo /bin/sh)"'
PORTS: Final = (443, 80)
"""Ports of allowed hosts: Harbor's rules have only hosts, but the executor's need host and port."""

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}

Config = Mapping[str, Any]


def parse_config(folder: Folder, notes: Notes) -> Config | None:
    """Parse `task.toml` and check every key of it; None if it cannot be used."""
    try:
        text = folder.text(CONFIG)
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.refuse(CONFIG, f"is not TOML: {error}")
        return None
    key = "schema_version" if "schema_version" in config else "version"
    version = str(config.get(key, "1.0"))
    # Harbor itself does not read the version, and many public tasks have one of their own.
    if not re.fullmatch(r"1(\.\d+)?", version):
        notes.report(
            CONFIG, f"{key} {version!r} is not a schema of Harbor, expected 1.x: it is read as 1.4", line_of(text, key)
        )
    for path in dict.fromkeys(leaves(config)):
        kind, instead = handling_of(path)
        if kind == "reported":
            notes.report(CONFIG, f"{path} is not supported: {instead}", line_of(text, path))
        elif kind == "refused":
            notes.refuse(CONFIG, f"{path}: {instead}", line_of(text, path))
    return None if notes.problems else config


def _columns(folder: Folder, notes: Notes) -> Mapping[str, Any]:
    return {**tomllib.loads(folder.text(CONFIG)).get("metadata", {}), "name": folder.name}


def _task(folder: Folder, notes: Notes, place: SourcePlace) -> Task | None:
    config = parse_config(folder, notes)
    return None if config is None else _Reader(folder, config, notes, place).task()


FORMAT: Final = FolderFormat(CONFIG, _columns, _task)


class _Reader:
    """Reads one folder. Records problems in the notes and continues, so that all are found."""

    def __init__(self, folder: Folder, config: Config, notes: Notes, place: SourcePlace) -> None:
        self.folder, self.config, self.notes, self.place = folder, config, notes, place
        self.environment = self.table("environment")
        self.verifier = self.table("verifier")
        self.grading = self.table("verifier.environment")
        docker = "environment/Dockerfile"
        self.facts = facts_of(folder.text(docker), {}, None) if docker in folder.files else None
        self.working_dir: str | None = None

    def task(self) -> Task | None:
        """Return the task, or None with problems in the notes."""
        self.report_unsupported_files()
        seconds = self.value("environment.build_timeout_sec", int, float) or BUILD_SECONDS
        variables = {"CONTEXT_DIR": "."}
        compose = ComposeReader(self.folder, self.notes, COMPOSE, MAIN, self.place, variables, seconds).read()
        if (given := compose.dockerfile) is not None:
            self.facts = facts_of(given.text, given.args, given.target)
        self.working_dir = self.value("environment.workdir", str) or compose.working_dir
        if self.working_dir is None and self.facts is not None:
            self.working_dir = self.facts.working_dir
        steps = self.steps()
        agent_seconds = self.seconds("agent.timeout_sec") or NO_AGENT_LIMIT
        if steps:
            own = [self.seconds(f"steps.{n}.agent.timeout_sec") or agent_seconds for n in range(len(steps))]
            agent_seconds = min(sum(own), NO_AGENT_LIMIT)
        sandbox = self.sandbox(compose)
        dockerfile = self.job_dockerfile("environment", "environment", compose.dockerfile)
        solution, solution_files = self.solution("solution") if not steps else ([], [])
        prompt = steps[0].prompt if steps else self.prompt("instruction.md")
        verifier = None if steps else self.verifier_of("tests", "verifier")
        built = [dockerfile, verifier and verifier.dockerfile, *(service.dockerfile for service in compose.services)]
        if any(built) and sandbox.network is not None:
            # In Harbor, network_mode is for the finished container: its build always has a network.
            network = sandbox.network.model_copy(update={"setup": BUILD_NETWORK})
            sandbox = sandbox.model_copy(update={"network": network})
        services, setup_checks = compose.services, self.healthcheck()
        if services and setup_checks:
            # The setup runs before the services, which the check may ask.
            check = TaskService(name="main-healthcheck", command=setup_checks, completes=True)
            services, setup_checks = [*services, check], []
        if self.notes.problems or not prompt:
            return None
        return Task(
            name=re.sub(r"[^A-Za-z0-9._@+=-]", "-", self.folder.name),
            prompt=prompt,
            # Files and their parent folders are created with root's rights, because the agent's user may lack them.
            files=[*(TaskFile(path=f"{folder}/{MARK}", content="") for folder in LOGS), *compose.files],
            services=services,
            volumes=compose.volumes,
            setup=[" && ".join(f"rm {folder}/{MARK} && chmod 777 {folder}" for folder in LOGS), *setup_checks],
            solution=solution,
            solution_files=solution_files,
            verifier=verifier,
            timeouts=Timeouts(
                agent_seconds=min(agent_seconds, NO_AGENT_LIMIT),
                verifier_seconds=self.seconds("verifier.timeout_sec") or math.ceil(VERIFIER_SECONDS),
            ),
            sandbox=sandbox,
            dockerfile=dockerfile,
            tags=tags_of(self.table("metadata")),
            steps=steps,
            step_reward=StepReward.FINAL
            if self.config.get("multi_step_reward_strategy") == "final"
            else StepReward.MEAN,
        )

    # Values of task.toml

    def value(self, path: str, *kinds: type) -> Any:
        """Return the value of a key, None if it is missing; another type than expected is a problem."""
        value: Any = self.config
        for part in path.split("."):
            value = (
                value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
            )
            if value is None:
                return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = {
                str: "text",
                int: "a whole number",
                float: "a number",
                dict: "a table",
                list: "a list",
                bool: "true or false",
            }
            self.refuse(path, f"is {value!r}, expected {' or '.join(names[kind] for kind in kinds)}")
            return None
        return value

    def refuse(self, path: str, message: str) -> None:
        plain = re.sub(r"\.\d+", "[]", path)
        self.notes.refuse(CONFIG, f"{path}: {message}", line_of(self.folder.text(CONFIG), plain))

    def report(self, path: str, message: str) -> None:
        self.notes.report(CONFIG, f"{path}: {message}", line_of(self.folder.text(CONFIG), path))

    def table(self, path: str) -> dict[str, Any]:
        return self.value(path, dict) or {}

    def seconds(self, path: str) -> int | None:
        value = self.value(path, int, float)
        if value is None:
            return None
        if not 0 < value <= 604_800:
            self.refuse(path, f"is {value}, expected seconds from 1 to 604800")
            return None
        return math.ceil(float(value))

    def env(self, path: str) -> list[EnvVar]:
        """Return variables with `${NAME}` and `${NAME:-default}` filled in."""

        def filled(match: re.Match[str]) -> str:
            found = self.notes.variable(CONFIG, self.place, match[1])
            if found is None and match[2] is None:
                self.refuse(path, variable_missing(match[1]))
            return match[2] or "" if found is None else found

        return [EnvVar(name=name, value=_VARIABLE.sub(filled, str(value))) for name, value in self.table(path).items()]

    def user(self, path: str) -> str | None:
        value = self.value(path, str, int)
        return None if value is None else str(value)

    def megabytes(self, key: str, legacy: str) -> str | None:
        amount = self.value(f"environment.{key}", int)
        text = self.value(f"environment.{legacy}", str)
        if amount is None and text is not None:
            match = re.fullmatch(r"([0-9.]+)\s*([KMG])", text.strip().upper())
            if match is None:
                self.refuse(f"environment.{legacy}", f"is {text!r}, expected a size such as 512M or 2G")
                return None
            amount = int(float(match[1]) * _SIZES[match[2]])
        return None if amount is None else f"{amount}Mi"

    # Parts of the folder

    def report_unsupported_files(self) -> None:
        """Report files and keys of the folder that are not supported."""
        if str(self.value("environment.os", str) or "linux").lower() != "linux":
            self.refuse("environment.os", "is not linux; only Linux is supported; remove the task")
        if "tests/docker-compose.yaml" in self.folder.files:
            message = "needs services for the grading alone, which is not supported; remove the task"
            self.notes.refuse("tests/docker-compose.yaml", message)
        if "tests/Dockerfile" in self.folder.files and not self.is_separate():
            self.notes.report("tests/Dockerfile", "is not built: the task is graded in the agent's own workspace")
        if not self.is_separate():
            if self.config.get("artifacts"):
                self.report("artifacts", "are not kept, because the task is graded in the agent's own workspace")
            if self.verifier.get("collect"):
                self.report("verifier.collect", "is not run, because the task is graded in the agent's own workspace")
        for path in self.folder.files:
            if posixpath.basename(path) == ".harborignore":
                self.notes.report(path, "its patterns are ignored: all files are used")
            elif posixpath.basename(path) == "trajectory.json" and path.count("/") in (0, 2) and "tests" not in path:
                self.notes.report(path, "the agent begins without this conversation")

    def prompt(self, path: str) -> str:
        """Return an instruction without the canary lines at its beginning, which are not part of it."""
        if path not in self.folder.files:
            self.notes.refuse(path, "is missing; it must contain the agent's instructions")
            return ""
        lines = self.folder.text(path).split("\n")
        while lines and _CANARY.match(lines[0].strip()):
            lines.pop(0)
        text = "\n".join(lines).lstrip("\n")
        if not text.strip():
            self.notes.refuse(path, "is empty; it must contain the agent's instructions")
        return text

    def image(self, path: str, context: str, name: str, instead: str) -> str | None:
        """Return the image that a table names, else the one that is built from its folder."""
        given: str | None = self.value(f"{path}.docker_image", str)
        if given is not None or self.place.dockerfiles is not None:
            return given
        seconds = self.value(f"{path}.build_timeout_sec", int, float) or BUILD_SECONDS
        template = self.place.image_template
        return built_image(
            self.folder, self.notes, template, context=context, name=name, seconds=seconds, instead=instead
        )

    def job_dockerfile(self, path: str, context: str, given: Dockerfile | None = None) -> Dockerfile | None:
        """Return the given Dockerfile, or that of its folder, unless the table names an image or the job uses images."""
        if self.place.dockerfiles is None or self.value(f"{path}.docker_image", str) is not None:
            return None
        if given is not None:
            return given
        seconds = self.value(f"{path}.build_timeout_sec", int, float) or BUILD_SECONDS
        return job_dockerfile(self.folder, self.notes, self.place.dockerfiles, context=context, seconds=seconds)

    def sandbox(self, compose: Compose) -> SandboxOverrides:
        # A Dockerfile that the job builds has the folder of its base image.
        if self.working_dir is None and (self.facts is None or self.place.dockerfiles is None):
            message = "no workdir and no readable WORKDIR: commands start in the job's sandbox.workingDir"
            self.notes.report(CONFIG, message)
        cpus = self.value("environment.cpus", int, float)
        resources = Resources(
            cpu=None if cpus is None else f"{cpus:g}",
            memory=self.megabytes("memory_mb", "memory"),
            disk=self.megabytes("storage_mb", "storage"),
        )
        baseline = self.access("environment", "Public")
        grading = self.access("verifier.environment", baseline) if self.is_separate() else baseline
        return SandboxOverrides(
            image=self.image("environment", "environment", self.folder.name, "the job's sandbox.image"),
            working_dir=self.working_dir,
            user=self.user("agent.user"),
            env=list({variable.name: variable for variable in [*compose.env, *self.env("environment.env")]}.values()),
            resources=resources if resources != Resources() else None,
            network=Network(
                setup=baseline, agent=self.access("agent", baseline), verifier=self.access("verifier", grading)
            ),
        )

    def access(self, path: str, default: NetworkAccess) -> NetworkAccess:
        """Return the network access for `network_mode` and `allowed_hosts` of a table."""
        mode, hosts = self.value(f"{path}.network_mode", str), self.value(f"{path}.allowed_hosts", list) or []
        internet = self.value(f"{path}.allow_internet", bool) if path.endswith("environment") else None
        if mode is None and internet is not None:
            mode = "public" if internet else "no-network"
        if mode not in (None, "public", "no-network", "allowlist"):
            self.refuse(f"{path}.network_mode", f"is {mode!r}, expected public, no-network or allowlist")
        if mode != "allowlist":
            if hosts:
                self.refuse(f"{path}.allowed_hosts", "is only for network_mode allowlist; remove it")
            return default if mode is None else "Public" if mode == "public" else "None"
        found = []
        for host in map(str, hosts):
            if "*" in host or "/" in host:
                self.report(f"{path}.allowed_hosts", f"{host} is not reachable: only full host names are supported")
                continue
            address = f"[{host}]" if ":" in host else host.rstrip(".")
            found += [f"{address}:{port}" for port in PORTS]
        if found:
            self.report(f"{path}.allowed_hosts", "the hosts are reachable only at ports 443 and 80")
        return found or "None"

    def healthcheck(self, path: str = "environment.healthcheck") -> list[str]:
        """Return a setup command that runs the healthcheck as Docker would. It runs last in the setup, because the
        image's own programs are not started.
        """
        command = self.value(f"{path}.command", str)
        if command is None:
            return []
        defaults = {"interval_sec": 5, "timeout_sec": 30, "start_interval_sec": 5, "retries": 3, "start_period_sec": 0}
        given = {name: self.value(f"{path}.{name}", int, float) for name in defaults}
        value = {name: f"{default if given[name] is None else given[name]:g}" for name, default in defaults.items()}
        return [
            f"began=$(date +%s); failed=0\n"
            f"until timeout {value['timeout_sec']} sh -c {shlex.quote(command)}; do\n"
            f"  if [ $(($(date +%s) - began)) -lt {value['start_period_sec']} ]; then\n"
            f"    sleep {value['start_interval_sec']}; continue\n  fi\n"
            f'  failed=$((failed + 1)); [ "$failed" -lt {value["retries"]} ] || exit 1\n'
            f"  sleep {value['interval_sec']}\ndone"
        ]

    def solution(self, folder: str) -> tuple[list[str], list[TaskFile]]:
        if f"{folder}/solve.sh" not in self.folder.files:
            return [], []
        exports = "".join(f"export {v.name}={shlex.quote(v.value)}\n" for v in self.env("solution.env"))
        command = f"{exports}export DEBIAN_FRONTEND=noninteractive\n{self.script(f'{folder}/solve.sh', SOLUTION)}"
        return [command], self.folder.as_files(folder, SOLUTION)

    def script(self, path: str, target: str) -> str:
        """Return the command that starts a script with the interpreter in its first line, because the x bit may be lost
        in storage. Without one it is bash, as in Harbor, or sh where the image has no bash.
        """
        self.notes.check_script(self.folder, path)
        first = self.folder.read(path).split(b"\n", 1)[0]
        program = first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ANY_BASH
        return f"{program} {target}/{posixpath.basename(path)}"

    # Grading

    def is_separate(self) -> bool:
        mode = self.value("verifier.environment_mode", str)
        if mode not in (None, "shared", "separate"):
            self.refuse("verifier.environment_mode", f"is {mode!r}, expected shared or separate")
        if mode == "shared" and self.grading:
            self.refuse("verifier.environment", "is only for environment_mode separate; remove one of them")
        return mode == "separate" or bool(self.grading)

    def verifier_of(self, folder: str, path: str, shared_folder: str | None = None) -> TaskVerifier | None:
        folders = [name for name in (shared_folder, folder) if name and self.folder.below(name)]
        scripts = [f"{name}/test.sh" for name in folders if f"{name}/test.sh" in self.folder.files]
        if not scripts:
            self.notes.refuse(f"{folder}/test.sh", "is missing; it grades the task")
            return None
        files = {file.path: file for name in folders for file in self.folder.as_files(name, TESTS)}
        command = self.script(scripts[-1], TESTS)
        user = self.user(f"{path}.user") or self.user("verifier.user")
        if user is None and self.user("agent.user") is not None:
            user = (self.facts and self.facts.user) or "root"
        tables = dict.fromkeys(("verifier.env", "verifier.environment.env", f"{path}.env"))
        variables = {variable.name: variable for table in tables for variable in self.env(table)}
        is_separate = self.is_separate() and path == "verifier"
        return TaskVerifier(
            kind=VerifierKind.REWARD_FILE,
            files=list(files.values()),
            commands=[command],
            env=list(variables.values()),
            user=user,
            mode=VerifierMode.SEPARATE if is_separate else VerifierMode.SHARED,
            collect=self.hooks() if is_separate else [],
            artifacts=self.artifacts() if is_separate else [],
            image=self.image("verifier.environment", "tests", f"{self.folder.name}-tests", "the task's own image")
            if is_separate
            else None,
            dockerfile=self.job_dockerfile("verifier.environment", "tests") if is_separate else None,
        )

    def hooks(self) -> list[str]:
        """Return commands that run in the agent's workspace before its artifacts are taken. Those of other services are
        reported.
        """
        return [f"{hook.get('command', ':')}\ntrue" for hook in self.verifier.get("collect", [])]

    def artifacts(self) -> list[str]:
        """Return the artifacts for the grading: the conventional folder, and the declared ones."""
        entries = [
            entry if isinstance(entry, str) else entry.get("source", "")
            for entry in self.value("artifacts", list) or []
        ]
        sources = dict.fromkeys([CONVENTION, *(posixpath.normpath(str(entry)) for entry in entries)])
        for source in sources:
            if not source.strip("/") or ".." in source.split("/"):
                self.refuse("artifacts", f"{source!r} cannot be an artifact; expected a file or folder below the root")
        return list(sources)

    # Steps

    def steps(self) -> list[TaskStep]:
        entries = self.value("steps", list) or []
        return [step for number in range(len(entries)) if (step := self.step(number)) is not None]

    def step(self, number: int) -> TaskStep | None:
        path = f"steps.{number}"
        name = self.value(f"{path}.name", str)
        if not name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@+=-]*", name):
            self.refuse(
                path,
                f"its name is {name!r}, expected the name of its folder below steps/, of letters, digits and ._@+=-",
            )
            return None
        if self.value(f"{path}.verifier.environment_mode", str) == "separate" or self.is_separate():
            self.report("verifier.environment_mode", "steps are graded in the agent's own workspace")
        folder = f"steps/{name}"
        prompt = self.prompt(f"{folder}/instruction.md")
        files = self.folder.as_files(f"{folder}/workdir", ".")
        files = [file.model_copy(update={"path": file.path.removeprefix("./")}) for file in files]
        setup = ["bash ./setup.sh"] if f"{folder}/workdir/setup.sh" in self.folder.files else []
        solution, solution_files = self.solution(f"{folder}/solution")
        if not solution:
            solution, solution_files = self.solution("solution")
        least = self.value(f"{path}.min_reward", int, float, dict)
        verifier = self.verifier_of(f"{folder}/tests", f"{path}.verifier", shared_folder="tests")
        if verifier is None or not prompt:
            return None
        return TaskStep(
            name=name,
            prompt=prompt,
            files=files,
            setup=[*setup, *self.healthcheck(f"{path}.healthcheck")],
            solution=solution,
            solution_files=solution_files,
            verifier=verifier,
            min_rewards={} if least is None else least if isinstance(least, dict) else {"reward": float(least)},
            verifier_seconds=self.seconds(f"{path}.verifier.timeout_sec"),
        )

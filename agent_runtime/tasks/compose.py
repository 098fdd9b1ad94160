"""docker-compose.yaml of Terminal-bench and Harbor: the services beside the agent's own.

The keys follow the Compose specification (compose-spec.io). All services of a task have one network, and one limit of
resources, so keys about networks and resources have no effect.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml
from pydantic import ValidationError

from agent_runtime.tasks.folders import Folder, Notes, variable_missing
from agent_runtime.tasks.images import job_dockerfile
from agent_runtime.tasks.place import SourcePlace
from rollout_api.files import Dockerfile, TaskFile
from rollout_api.sandbox import EnvVar
from rollout_api.services import HealthCheck, ServiceState, TaskService

PROJECT: Final = "task"
"""Value of COMPOSE_PROJECT_NAME, which Compose sets itself."""
CHECK_SECONDS, CHECK_TRIES = 30.0, 3
"""Compose's defaults of a health check: of interval and timeout, and of retries."""
_SUPPORTED: Final = frozenset(
    {"build", "image", "command", "entrypoint", "environment", "env_file", "depends_on", "healthcheck", "volumes"}
    | {"working_dir", "user", "container_name", "hostname", "networks", "expose", "ports"}
)
_WITHOUT_EFFECT: Final = frozenset(
    {"restart", "init", "tty", "stdin_open", "labels", "logging", "stop_grace_period", "stop_signal", "pull_policy"}
    | {"deploy", "mem_limit", "memswap_limit", "cpus", "platform", "links", "shm_size", "attach", "annotations"}
    | {"security_opt", "ulimits", "cap_drop", "cpu_shares", "mem_reservation", "mem_swappiness", "oom_kill_disable"}
)
"""Keys that set what a workspace has anyway, or that only concern Docker."""
_LIST_OR_MAPPING: Final = (list, dict)
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("ports", "expose", "links", "volumes"), (list,)),
    **dict.fromkeys(("depends_on", "environment", "networks"), _LIST_OR_MAPPING),
    **dict.fromkeys(("command", "entrypoint"), (str, list)),
    "build": (str, dict),
    "env_file": (str, list, dict),
    "healthcheck": (dict,),
}
_TYPE_NAMES: Final[Mapping[type, str]] = {list: "a list", dict: "a mapping", str: "a text"}
_STATES: Final = {
    "service_started": ServiceState.STARTED,
    "service_healthy": ServiceState.HEALTHY,
    "service_completed_successfully": ServiceState.COMPLETED,
}
MOST_VALUES, MOST_LEVELS = 100_000, 64
"""Limits of a file: aliases let a short text have any number of values, at any depth."""
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(:?[-?+]|(?=\}))|([A-Za-z_][A-Za-z0-9_]*))")
_DEFAULTS = 16
"""Limit of defaults within defaults."""
_ENV_VALUE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|((?:(?!\s#).)*)""")
_OPENING_QUOTE = re.compile(r"""[^=:#'"]*[=:]\s*(['"])""")
_TO_CLOSING_QUOTE: Final = {"'": re.compile(r"[^']*'"), '"': re.compile(r'(?:[^"\\]|\\.)*"')}
# `$$` is a dollar sign when variables are filled in.
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$$"}
_ESCAPED = re.compile(r"\\(.)")
_IDLE = re.compile(r"(?:exec +)?(?:sleep|tail -[fF]|true|:|wait|read)(?: .*)?|")
"""Commands that keep a container running, and do nothing else."""
_SHELL = re.compile(r"(?:/(?:usr/)?bin/)?(?:ba)?sh\b(?: +-\w+)*")
_BETWEEN_COMMANDS = re.compile(r"&&|\|\||[;&\n]|\b(?:while|do|done)\b")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as Docker Compose does. PyYAML would read `33:33` as 2013, and `on` as true."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|0o?[0-7_]+|0x[0-9a-fA-F_]+|0b[01_]+|[1-9][0-9_]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


@dataclass(frozen=True)
class Compose:
    """What a file says about a task."""

    env: list[EnvVar] = field(default_factory=list)
    """Variables of the agent's own service."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Volumes of the agent's own service that other services have too."""
    services: list[TaskService] = field(default_factory=list)
    files: list[TaskFile] = field(default_factory=list)
    """Files of the folder that are mounted into the agent's own service."""
    dockerfile: Dockerfile | None = None
    """Dockerfile of the agent's own service; None if the file says nothing about it, or the job uses images."""
    working_dir: str | None = None
    """Folder in which commands of the agent's own service start."""


@dataclass
class ComposeReader:
    """Reads one file. Records problems in the notes and continues, so that all are found."""

    folder: Folder
    notes: Notes
    file: str
    """The file's path in the folder."""
    own: str
    """Name of the service in which the agent works."""
    place: SourcePlace
    variables: Mapping[str, str]
    """Variables for `${NAME}` that the benchmark sets."""
    build_seconds: float
    has_any_name: bool = False
    """Whether a single service is the agent's own, whatever its name."""
    own_image: str | None = None
    """Image of the agent's own service, which others may use too."""
    own_needs: Mapping[str, ServiceState] = field(default_factory=dict)
    """States of the services for which the agent's own service waits."""
    links: Mapping[str, list[str]] = field(default_factory=dict)
    """Further names of services, by service."""
    env_file: Mapping[str, str] = field(default_factory=dict)
    """Variables of the file `.env` beside this one."""
    earlier: Mapping[str, str | None] = field(default_factory=dict)
    """Variables of the lines of an env file above the one that is read."""

    def read(self) -> Compose:
        """Return what it says; an empty one if there is no such file, or with problems in the notes."""
        if self.file not in self.folder.files:
            return Compose()
        if (path := self.path_of(".env")) in self.folder.files:
            self.env_file = self.env_lines(self.folder.text(path))
        try:
            # A subclass of the safe loader.
            content = yaml.load(self.folder.text(self.file), _Loader) or {}
            if _is_too_large(content):
                self.refuse(f"has more than {MOST_VALUES} values or {MOST_LEVELS} levels; write it without aliases")
                return Compose()
            services = {str(name): dict(value or {}) for name, value in (content.get("services") or {}).items()}
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            self.refuse("is not a mapping with services", mark.line + 1 if mark is not None else None)
            return Compose()
        for key in ("include", "configs", "secrets"):
            if content.get(key):
                self.refuse(f"{key} is not supported; write its content into the services")
        if "extends" in str([list(service) for service in services.values()]):
            self.refuse("extends is not supported; write the extended keys into the service")
        services = {name: self.well_typed(name, self.filled(service)) for name, service in services.items()}
        for name in [name for name, service in services.items() if service.pop("profiles", None) and name != self.own]:
            self.report(f"services.{name} has profiles, so it is not started")
            del services[name]
        if self.has_any_name and len(services) == 1:
            self.own = next(iter(services))
        own = services.pop(self.own, {})
        if services and self.place.dockerfiles is None:
            self.refuse(
                f"needs {', '.join(sorted(services))} in addition to {self.own}, which needs tasks.dockerfiles: "
                "services are built as layers over the task's base image"
            )
            return Compose()
        self.judge_keys(self.own, own)
        self.check_ports(services)
        self.judge_own(own)
        mounts = {name: list(self.volumes(service)) for name, service in services.items()}
        named = {source for found in mounts.values() for source, _, is_named in found if is_named}
        volumes = {source: target for source, target, is_named in self.volumes(own) if is_named and source in named}
        for entry in own.get("volumes") or []:
            source = _read_only_source(entry)
            if source in volumes:
                self.report(f"services.{self.own}.volumes: {source} is not read-only: the agent can write into it")
        self.own_image = own.get("image")
        self.own_needs = self.dependencies(self.own, own)
        for name in sorted(self.own_needs.keys() - services.keys()):
            self.refuse(f"services.{self.own} depends on {name!r}, which is not a service of this file")
        self.links = self.linked_names([own, *services.values()])
        found = [self.service(name, service, mounts[name]) for name, service in services.items()]
        return Compose(
            env=self.environment(self.own, own),
            volumes=volumes,
            services=[service for service in found if service is not None],
            files=[
                file
                for source, target, is_named in self.volumes(own)
                if not is_named
                for file in self.bound_files(self.own, source, target)
            ],
            dockerfile=self.own_dockerfile(own),
            working_dir=own.get("working_dir") or None,
        )

    def well_typed(self, name: str, service: dict[str, Any]) -> dict[str, Any]:
        """Return the service without the values of keys that have a wrong type, which are refused."""
        kept = dict(service)
        for key, types in _TYPES.items():
            value = kept.get(key)
            inner = value.values() if isinstance(value, dict) and key in ("depends_on", "networks") else ()
            if value is not None and not isinstance(value, types):
                expected = " or ".join(_TYPE_NAMES[one] for one in types)
                self.refuse(f"services.{name}.{key}: {value!r} is not supported, expected {expected}")
                del kept[key]
            elif any(item is not None and not isinstance(item, dict) for item in inner):
                self.refuse(f"services.{name}.{key}: {value!r} is not supported, expected a mapping of mappings")
                del kept[key]
        return kept

    def path_of(self, written: str) -> str:
        """Return the path in the task's folder that the file means."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.file), written))

    def refuse(self, message: str, line: int | None = None) -> None:
        self.notes.refuse(self.file, message, line)

    def report(self, message: str) -> None:
        self.notes.report(self.file, message)

    def filled(self, value: Any) -> Any:
        """Return a value with variables replaced, as `docker compose` does."""
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        return self.filled_text(value) if isinstance(value, str) else value

    def filled_text(self, text: str) -> str:
        """Return a text with variables replaced. A default may contain variables with defaults of their own."""
        found, at = [], 0
        while match := _VARIABLE.search(text, at):
            end = match.end()
            if match[1] is None:
                value = self.variable(match[3]) or "" if match[3] else "$"
            elif (end := _closing_brace(text, end)) < 0:
                value, end = match[0], match.end()
            else:
                value, end = self._with_operator(match[1], match[2], text[match.end() : end]), end + 1
            found += [text[at : match.start()], value]
            at = end
        return "".join([*found, text[at:]])

    def _with_operator(self, name: str, operator: str, word: str) -> str:
        value = self.variable(name)
        has = bool(value) if operator.startswith(":") else value is not None
        if operator.endswith("+"):
            return self.filled_text(word) if has else ""
        if has:
            return value or ""
        if operator.endswith("?"):
            self.refuse(variable_missing(name))
        return self.filled_text(word) if operator.endswith("-") else ""

    def variable(self, name: str) -> str | None:
        """Return a variable of the benchmark, or of the environment in which the job runs; None if it is not set."""
        if name in self.variables:
            return self.variables[name]
        if (value := self.notes.variable(self.file, self.place, name)) is not None:
            return value
        for values in (self.env_file, self.earlier):
            if (value := values.get(name)) is not None:
                return value
        return PROJECT if name == "COMPOSE_PROJECT_NAME" else None

    def judge_keys(self, name: str, service: Mapping[str, Any]) -> None:
        for key in sorted(set(map(str, service)) - _SUPPORTED - _WITHOUT_EFFECT):
            if not key.startswith("x-") and service[key]:
                self.report(f"services.{name}.{key} is not supported, and has no effect")

    def judge_own(self, own: Mapping[str, Any]) -> None:
        """Report programs of the agent's own service, other than those that only keep a container running."""
        for key in ("entrypoint", "command"):
            if not _is_idle(own.get(key) or ""):
                self.report(
                    f"services.{self.own}.{key} is not started: no program runs beside the agent in its own workspace; "
                    "make it another service"
                )

    def own_dockerfile(self, own: Mapping[str, Any]) -> Dockerfile | None:
        if self.place.dockerfiles is None:
            build = {**self.build(own), "context": None}
            for key in sorted(key for key, value in build.items() if value and value != "Dockerfile"):
                self.report(f"services.{self.own}.build.{key} has no effect without tasks.dockerfiles")
            return None
        if own.get("build"):
            return self.dockerfile(self.own, own)
        if own.get("image") and self.path_of("Dockerfile") not in self.folder.files:
            return self.image_alone(str(own["image"]))
        return None

    def image_alone(self, image: str) -> Dockerfile:
        return Dockerfile(text=f"FROM {image}\n", context=[], seconds=math.ceil(self.build_seconds))

    def check_ports(self, services: Mapping[str, Mapping[str, Any]]) -> None:
        users = defaultdict(list)
        for name, service in services.items():
            given = [*(service.get("expose") or []), *(service.get("ports") or [])]
            ports = {
                str(entry.get("target") if isinstance(entry, dict) else entry).rsplit(":", 1)[-1].split("/")[0]
                for entry in given
            }
            for port in ports:
                users[port].append(name)
        for port, names in users.items():
            if len(names) > 1:
                self.refuse(
                    f"services {' and '.join(names)} use the same port {port}, but all services of a task have one "
                    "network; give them different ports"
                )

    def service(self, name: str, service: Mapping[str, Any], mounts: list[tuple[str, str, bool]]) -> TaskService | None:
        self.judge_keys(name, service)
        if service.get("privileged") or service.get("network_mode") == "host":
            self.refuse(f"services.{name} needs rights on the machine (privileged, or the host's network)")
        files: list[TaskFile] = []
        for source, target, is_named in mounts:
            if not is_named:
                files += self.bound_files(name, source, target)
        try:
            return TaskService(
                name=name,
                dockerfile=self.dockerfile(name, service),
                **self.program(name, service),
                aliases=self.aliases(name, service),
                files=files,
                env=self.environment(name, service),
                user=None if service.get("user") is None else str(service["user"]),
                working_dir=service.get("working_dir"),
                depends_on=self.dependencies(name, service),
                completes=self.own_needs.get(name) is ServiceState.COMPLETED,
                health=self.health(name, service.get("healthcheck")),
                volumes={source: target for source, target, is_named in mounts if is_named},
            )
        except ValidationError as error:
            for problem in error.errors():
                where = ".".join(map(str, problem["loc"]))
                self.refuse(f"services.{name}: {where}: {problem['msg'].removeprefix('Value error, ')}")
        except (TypeError, ValueError, AttributeError) as error:
            self.refuse(f"services.{name}: {error}")
        return None

    def build(self, service: Mapping[str, Any]) -> Mapping[str, Any]:
        given = service.get("build")
        return {"context": given} if isinstance(given, str) else dict(given or {})

    def build_args(self, service: Mapping[str, Any]) -> dict[str, str]:
        args = self.build(service).get("args") or {}
        if not isinstance(args, _LIST_OR_MAPPING):
            self.refuse(f"build.args: {args!r} is not supported, expected a list or a mapping")
            return {}
        given = {name: self.variable(name) if value is None else value for name, value in pairs(args)}
        return {name: value for name, value in given.items() if value is not None}

    def dockerfile(self, name: str, service: Mapping[str, Any]) -> Dockerfile | None:
        build = self.build(service)
        if not build:
            image = service.get("image")
            if image and image == self.own_image:
                return None
            if not image:
                self.refuse(f"services.{name} has neither build nor image")
                return None
            return self.image_alone(str(image))
        for key in sorted(build.keys() - {"context", "dockerfile", "args", "target", "dockerfile_inline"}):
            self.report(f"services.{name}.build.{key} is not supported, and has no effect")
        context = self.path_of(str(build.get("context") or "."))
        context = "" if context == "." else context
        args = self.build_args(service)
        target = build.get("target")
        if build.get("dockerfile_inline"):
            self.notes.contexts.append(context)
            return Dockerfile(
                text=str(build["dockerfile_inline"]),
                context=self.folder.as_context(context),
                args=args,
                target=target,
                seconds=math.ceil(self.build_seconds),
            )
        assert self.place.dockerfiles is not None  # checked before any service is read
        written = str(build.get("dockerfile") or "Dockerfile")
        found = job_dockerfile(
            self.folder,
            self.notes,
            self.place.dockerfiles,
            context=context,
            seconds=self.build_seconds,
            name=written,
            args=args,
            target=target,
        )
        if found is None:
            self.refuse(f"services.{name}.build: {posixpath.join(context, written)} is missing")
        return found

    def program(self, name: str, service: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return what a service starts, as fields of TaskService. An empty text or list removes what its image has."""
        entrypoint, command = service.get("entrypoint"), service.get("command")
        program, args = self.words(name, "entrypoint", entrypoint), self.words(name, "command", command)
        if entrypoint is None and command is not None and not args:
            self.refuse(f"services.{name}.command: an empty one is not supported; write the program as entrypoint")
        if entrypoint is not None and not program:
            program, args = args, []
            if not program:
                self.refuse(f"services.{name}: entrypoint is empty, so command must be the program that it starts")
        return {"command": program, "args": args}

    def words(self, name: str, key: str, given: Any) -> list[str]:
        """Return a command as words; Compose splits a text like a shell, but runs it without one."""
        if given is None or given == "":
            return []
        if isinstance(given, list):
            return [_text(word) for word in given]
        try:
            return shlex.split(str(given))
        except ValueError as error:
            self.refuse(f"services.{name}.{key}: {error}")
            return []

    def aliases(self, name: str, service: Mapping[str, Any]) -> list[str]:
        networks = service.get("networks")
        given = [service.get("container_name"), service.get("hostname"), *self.links[name]]
        if isinstance(networks, dict):
            given += [alias for network in networks.values() for alias in (network or {}).get("aliases") or []]
        return [str(alias).lower() for alias in dict.fromkeys(given) if alias and str(alias) != name]

    def environment(self, name: str, service: Mapping[str, Any]) -> list[EnvVar]:
        values: dict[str, str] = {}
        env_file = service.get("env_file") or []
        for entry in [env_file] if isinstance(env_file, str | dict) else env_file:
            path = str(entry.get("path") if isinstance(entry, dict) else entry)
            path = self.path_of(path)
            if path in self.folder.files:
                values.update(self.env_lines(self.folder.text(path)))
            elif not isinstance(entry, dict) or entry.get("required", True):
                self.refuse(f"services.{name}.env_file: {path} is missing")
        for key, value in pairs(service.get("environment")):
            # A name without a value is that of the environment in which `docker compose` runs.
            found = self.variable(key) if value is None else value
            if found is not None:
                values[key] = found
        return [EnvVar(name=key, value=value) for key, value in values.items()]

    def env_lines(self, text: str) -> dict[str, str]:
        """Return the variables of an env file. Those without a value are the environment's."""
        found: dict[str, str | None] = {}
        self.earlier = found
        for line in _statements(text):
            line = line.strip().removeprefix("export ")
            # Compose takes `NAME: value` too.
            name, separator, written = _separated(line)
            name = name.strip()
            if not name or name.startswith("#"):
                continue
            match = _ENV_VALUE.match(written.strip())
            if not separator or match is None:
                found[name] = self.variable(name)
            elif match[1] is not None:
                found[name] = match[1]
            elif match[2] is not None:
                found[name] = self.filled_text(_ESCAPED.sub(lambda one: _ESCAPES.get(one[1], one[0]), match[2]))
            else:
                found[name] = self.filled_text(match[3].rstrip())
        self.earlier = {}
        return {name: value for name, value in found.items() if value is not None}

    def linked_names(self, services: Iterable[Mapping[str, Any]]) -> Mapping[str, list[str]]:
        """Return the further names that `links` give to services, by service."""
        names = defaultdict(list)
        for service in services:
            for link in service.get("links") or []:
                name, colon, alias = str(link).partition(":")
                if colon:
                    names[name].append(alias)
        return names

    def dependencies(self, user: str, service: Mapping[str, Any]) -> dict[str, ServiceState]:
        given = service.get("depends_on") or {}
        entries = given.items() if isinstance(given, dict) else ((name, {}) for name in given)
        found = {}
        for name, value in entries:
            condition = (value or {}).get("condition", "service_started")
            if condition not in _STATES:
                self.refuse(
                    f"services.{user}.depends_on.{name}.condition: {condition!r} is not a condition, expected one of "
                    f"{', '.join(_STATES)}"
                )
            found[str(name)] = _STATES.get(condition, ServiceState.STARTED)
        # The agent's own workspace is there before every service.
        found.pop(self.own, None)
        for link in service.get("links") or []:
            if (name := str(link).partition(":")[0]) != self.own:
                found.setdefault(name, ServiceState.STARTED)
        return found

    def health(self, name: str, given: Any) -> HealthCheck | None:
        test = given.get("test") if given else None
        if (given and given.get("disable")) or test in ("NONE", ["NONE"]):
            # Replaces the HEALTHCHECK of its Dockerfile.
            return HealthCheck(command="true")
        if not test:
            return None
        if not isinstance(test, str | list):
            self.refuse(f"services.{name}.healthcheck.test: {test!r} is not supported, expected a text or a list")
            return None
        command = test if isinstance(test, str) else shlex.join(map(str, test[1:]))
        if isinstance(test, list) and test[0] == "CMD-SHELL":
            command = str(test[1])
        interval, timeout = (self.seconds(name, given.get(key), CHECK_SECONDS) for key in ("interval", "timeout"))
        tries = int(given.get("retries") or CHECK_TRIES)
        # A service is unhealthy after so many failures in a row; each takes at most the interval and the time limit.
        total = self.seconds(name, given.get("start_period"), 0.0) + tries * (interval + timeout)
        return HealthCheck(command=command, seconds=math.ceil(total), timeout_seconds=max(1, math.ceil(timeout)))

    def seconds(self, name: str, given: Any, default: float) -> float:
        if given is None:
            return default
        text = str(given)
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            self.refuse(f"services.{name}.healthcheck: {text!r} is no duration, such as 10s or 1m30s")
            return default
        return sum(float(number) * _UNITS[unit] for number, unit in parts)

    def volumes(self, service: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
        """Yield (source, target, whether it is a named volume) of each volume; anonymous ones need nothing."""
        for entry in service.get("volumes") or []:
            if isinstance(entry, dict):
                kind, source, target = entry.get("type", "volume"), entry.get("source"), entry.get("target")
            else:
                source, colon, rest = str(entry).partition(":")
                source, target, kind = (source if colon else ""), rest.split(":")[0], ""
            if not source or kind == "tmpfs":
                continue  # an anonymous volume, or memory
            source = str(source)
            is_named = "/" not in source and not source.startswith((".", "~"))
            yield source, str(target).rstrip("/"), is_named

    def bound_files(self, name: str, source: str, target: str) -> list[TaskFile]:
        """Return the files of the task's folder at a path that a service mounts."""
        path = self.path_of(source)
        if path in self.folder.files:
            return [self.folder.as_file(path, target)]
        path = "" if path == "." else path
        bound = self.folder.as_files(path, target) if source.startswith(".") else []
        if not bound:
            self.report(f"services.{name}.volumes: {source} is not in the task's folder, and is not mounted")
        return bound


def pairs(given: Any) -> Iterator[tuple[str, str | None]]:
    """Yield name and value of a mapping, or of a list of NAME=VALUE; None for a name alone."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield str(name), None if value is None else _text(value)
    else:
        for entry in given or []:
            name, equals, value = str(entry).partition("=")
            yield name, value if equals else None


def _read_only_source(entry: Any) -> str | None:
    """Return the source of a read-only volume; None for others."""
    if isinstance(entry, dict):
        return str(entry.get("source")) if entry.get("read_only") else None
    source, _, rest = str(entry).partition(":")
    return source if "ro" in rest.partition(":")[2].split(",") else None


def _is_idle(command: str | list[Any]) -> bool:
    """Whether all that a command does is to keep a container running."""
    text = command if isinstance(command, str) else " ".join(map(str, command))
    text = _SHELL.sub("", text, count=1) if _SHELL.match(text) else text
    return all(_IDLE.fullmatch(part.strip(" \"'")) for part in _BETWEEN_COMMANDS.split(text))


def _statements(text: str) -> Iterator[str]:
    """Yield the lines of an env file; lines up to a closing quote are one."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        end = at + 1
        if (opening := _OPENING_QUOTE.match(lines[at])) is not None:
            closing = _TO_CLOSING_QUOTE[opening[1]]
            if closing.match(lines[at], opening.end()) is None:
                following = (number for number in range(end, len(lines)) if closing.match(lines[number]))
                end = next(following, at) + 1
        yield "\n".join(lines[at:end])
        at = end


def _separated(line: str) -> tuple[str, str, str]:
    """Split a line of an env file at its first `=` or `:`."""
    return min(line.partition("="), line.partition(":"), key=lambda parts: len(parts[0]))


def _closing_brace(text: str, start: int) -> int:
    """Return the position of the brace that closes the one before `start`; -1 if there is none, or a nested one is too
    deep.
    """
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
        if depth > _DEFAULTS:
            break
    return -1


def _is_too_large(content: object) -> bool:
    left, count = [(content, 0)], 0
    while left:
        value, level = left.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += [(item, level + 1) for item in inner]
        count += 1
        if count + len(left) > MOST_VALUES or level > MOST_LEVELS:
            return True
    return False


def _text(value: object) -> str:
    """Return a value as Docker Compose writes it."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)

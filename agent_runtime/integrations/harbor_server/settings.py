"""Settings of users of verl-recipe PR #83: the fields of `remote_agent` and `proxy_server`, and their variables.

The command line overrides the environment, and the environment overrides the YAML file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

SERVER_KEY: Final = "HARBOR_SERVER_KEY"
"""Environment variable with the key of the Harbor server, if its URL has none."""


class SettingsError(ValueError):
    """All problems of the settings, one per line."""


@dataclass(frozen=True)
class RemoteSettings:
    """PR #83's `RemoteAgentConfig` with its names and defaults, and how agents reach the model."""

    harbor_server_url: str = "http://localhost:8080"
    harbor_timeout: float = 1800.0
    """Time limit of a trial's agent, in seconds."""
    agent_name: str | None = None
    agent_import_path: str | None = None
    model_name: str | None = None
    agent_kwargs: Mapping[str, Any] | None = None
    max_retries: int = 3
    """Number of attempts in all, as in PR #83."""
    retry_base_delay: float = 2.0
    task_path_template: str = "/home/verl/dataset-tasks/{instance_id}"
    environment_overrides: Mapping[str, Any] | None = None
    environment_kwargs: Mapping[str, Any] | None = None
    environment_import_path: str | None = None
    use_local_trial: bool = False
    """Whether this engine runs the trial, in the worker; else the Harbor server does."""
    llm_proxy_ip: str | None = None
    """Host at which agents reach this process."""
    proxy_host: str = "0.0.0.0"
    """Address at which this process listens for model calls of agents."""
    proxy_port: int = 0
    """Port; 0: any free one."""
    proxy_server_url: str | None = None
    """A session proxy that agents call; this process connects to it and answers. None: agents call this process."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value


def _reference(value: Any) -> str:
    text = _text(value)
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError("expected `module:Class`")
    return text


def _number(
    convert: type[int] | type[float], is_allowed: Callable[[float], bool], expected: str
) -> Callable[[Any], Any]:
    def read(value: Any) -> int | float:
        if not is_allowed(number := convert(value)):
            raise ValueError(f"expected {expected}")
        return number

    return read


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f'expected a JSON object such as {{"name": "value"}}; {error}') from None
    if not isinstance(value, Mapping):
        raise ValueError('expected a JSON object such as {"name": "value"}')
    return value


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if (found := words.get(str(value).strip().lower())) is None:
        raise ValueError("expected true or false")
    return found


def _url(value: Any) -> str:
    text = _text(value)
    if not text.startswith(("http://", "https://")):
        raise ValueError("expected a URL that begins with http:// or https://")
    return text.rstrip("/")


_seconds = _number(float, lambda number: 0 < number <= 604_800, "seconds above 0 and at most 604800")
_delay = _number(float, lambda number: 0 <= number <= 3600, "seconds from 0 to 3600")
_count = _number(int, lambda number: 1 <= number <= 100, "a whole number from 1 to 100")
_port = _number(int, lambda number: 0 <= number <= 65_535, "a port from 0 to 65535")


@dataclass(frozen=True)
class _Source:
    field: str
    variable: str | None
    read: Callable[[Any], Any]
    place: str = "remote_agent"
    key: str | None = None

    @property
    def path(self) -> str:
        return f"{self.place}.{self.key or self.field}"

    def configured(self, config: Mapping[str, Any]) -> Any:
        return (config.get(self.place) or {}).get(self.key or self.field)


SOURCES: Final = (
    _Source("harbor_server_url", "HARBOR_SERVER_URL", _url),
    _Source("harbor_timeout", "HARBOR_TIMEOUT", _seconds),
    _Source("agent_name", "REMOTE_AGENT_NAME", _text),
    _Source("agent_import_path", "REMOTE_AGENT_IMPORT_PATH", _reference),
    _Source("model_name", "REMOTE_MODEL_NAME", _text),
    _Source("agent_kwargs", "REMOTE_AGENT_KWARGS", _object),
    _Source("max_retries", "REMOTE_AGENT_MAX_RETRIES", _count),
    _Source("retry_base_delay", "REMOTE_AGENT_RETRY_BASE_DELAY", _delay),
    _Source("task_path_template", "REMOTE_AGENT_TASK_PATH_TEMPLATE", _text),
    _Source("environment_overrides", "REMOTE_AGENT_ENVIRONMENT_OVERRIDES", _object),
    _Source("environment_kwargs", "REMOTE_AGENT_ENVIRONMENT_KWARGS", _object),
    _Source("environment_import_path", "REMOTE_AGENT_ENVIRONMENT_IMPORT_PATH", _reference),
    _Source("use_local_trial", "REMOTE_AGENT_USE_LOCAL_TRIAL", _flag),
    _Source("proxy_server_url", "PROXY_SERVER_URL", _url),
    _Source("llm_proxy_ip", "LLM_PROXY_IP", _text, "proxy_server"),
    _Source("proxy_host", None, _text, "proxy_server", "host"),
    _Source("proxy_port", None, _port, "proxy_server", "port"),
)
"""Sources of each field: `<place>.<key>` of the configuration, and the environment variable."""


def read_settings(
    config: Mapping[str, Any], environ: Mapping[str, str], command_line: Mapping[str, Any] | None = None
) -> RemoteSettings | None:
    """Return the settings; None if neither the configuration nor the environment has any for a remote agent.

    `config` is verl's whole configuration, `command_line` the values that were given there, as
    `{"remote_agent.agent_name": …}`. An empty variable counts as unset, as in PR #83. Raises SettingsError with all
    problems.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    said = any(value is not None for value in (config.get("remote_agent") or {}).values())
    given = said or any(environ.get(s.variable) for s in SOURCES if s.variable and s.place == "remote_agent")
    for source in SOURCES:
        variable = source.variable and environ.get(source.variable)
        candidates = [
            (source.path, (command_line or {}).get(source.path)),
            (f"environment variable {source.variable}", variable or None),
            (source.path, source.configured(config)),
        ]
        found = next(((where, value) for where, value in candidates if value is not None), None)
        if found is None:
            continue
        where, value = found
        try:
            values[source.field] = source.read(value)
        except (ValueError, TypeError) as error:
            problems.append(f"{where}: is {value!r:.200}: {error}")
    if values.get("agent_name") and values.get("agent_import_path"):
        problems.append("agent_name and agent_import_path are both given; leave one of them out")
    if problems:
        raise SettingsError("\n".join(problems))
    return RemoteSettings(**values) if given else None


def given_at(overrides: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings given on the command line: `overrides` are Hydra's, `config` is their result."""
    named = [override.lstrip("+~").partition("=")[0] for override in overrides]
    return {
        source.path: source.configured(config)
        for source in SOURCES
        if any(name == source.path or name.startswith(f"{source.path}.") for name in named)
    }


def as_environment(settings: RemoteSettings) -> dict[str, str]:
    """Return environment variables with the same settings, for processes without access to the command line."""
    variables = {source.field: source.variable for source in SOURCES}
    found: dict[str, str] = {}
    for field in fields(settings):
        value, variable = getattr(settings, field.name), variables[field.name]
        if value is None or variable is None:
            continue
        if isinstance(value, Mapping):
            found[variable] = json.dumps(dict(value))
        else:
            found[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    return found

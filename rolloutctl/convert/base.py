"""Interface of converters, which convert another system's configuration and report every key that is not converted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollout_api.base import API_VERSION, object_name
from rollout_api.manifest import KIND

NO_COUNTERPART = "has no counterpart here and is left out"


@dataclass(frozen=True)
class Note:
    """A remark about one key of the input: it was left out, or has another meaning here."""

    key: str
    """Path of the key, such as `environments[0].max_retries`; empty for a remark without a key."""
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


@dataclass(frozen=True)
class Conversion:
    """A manifest, and notes about keys that it does not include."""

    manifest: dict[str, Any]
    notes: list[Note]


class UnusableInput(ValueError):
    """The input cannot be converted. The message names the key, its problem and the remedy."""


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file. Raises UnusableInput."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeError) as error:
        raise UnusableInput(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UnusableInput(f"is neither JSON nor YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UnusableInput("is not a mapping, as a configuration must be")
    return values


@dataclass(frozen=True)
class Source:
    """A parsed configuration file."""

    path: Path
    values: Mapping[str, Any]
    evaluation: bool = False
    """Convert the evaluation instead of the training, for a file that describes both."""
    overrides: Sequence[str] = ()
    """`key=value`, as on Hydra's command line."""
    llm: Mapping[str, Any] = field(default_factory=dict)
    """Real Work's `--llm-` options by their names in `llm_config`; they override the file's."""


@dataclass(frozen=True)
class Converter:
    """One supported system."""

    system: str
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether the file's top level belongs to that system."""
    convert: Callable[[Source], Conversion]
    """Raises UnusableInput."""


_WORDS: dict[type[Any], str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


@dataclass
class Keys:
    """A mapping of the input that tracks which keys are used, so that unused keys are reported."""

    values: Mapping[str, Any]
    path: str
    notes: list[Note]
    left: set[str] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise UnusableInput(f"{self.path or 'the file'}: is {self.values!r}, expected a mapping")
        # A key without a value means the same as a missing key.
        self.left = {name for name, value in self.values.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, of the default's type; the default if it is absent or null.

        Raises UnusableInput for a value of another type.
        """
        self.left.discard(name)
        value = self.values.get(name)
        return default if value is None else self._check_type(name, value, type(default))

    def require(self, name: str, kind: type[Any]) -> Any:
        """Return the value of a required key. Raises UnusableInput."""
        self.left.discard(name)
        if (value := self.values.get(name)) is None:
            raise UnusableInput(f"{self.where(name)}: is missing")
        return self._check_type(name, value, kind)

    def _check_type(self, name: str, value: Any, kind: type[Any]) -> Any:
        fits = isinstance(value, int | float if kind is float else kind) and (
            kind is bool or not isinstance(value, bool)
        )
        if kind is not type(None) and not fits:
            raise UnusableInput(f"{self.where(name)}: is {value!r:.60}, expected {_WORDS[kind]}")
        return value

    def below(self, name: str) -> "Keys":
        return Keys(self.take(name, {}), self.where(name), self.notes)

    def note(self, name: str, message: str) -> None:
        self.left.discard(name)
        self.notes.append(Note(self.where(name), message))

    def report_rest(self, reasons: Mapping[str, str]) -> None:
        """Add a note for every unused key, with the reason from `reasons` if it has one."""
        for name in sorted(self.left):
            self.note(name, f"{NO_COUNTERPART}{f': {reasons[name]}' if name in reasons else ''}")

    def where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def manifest(name: str, spec: Mapping[str, Any], suffix: str = "") -> dict[str, Any]:
    named = {"name": object_name(name, suffix)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": dict(spec)}

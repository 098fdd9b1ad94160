"""Base class and shared field types of the API: immutable, camelCase in JSON, unknown fields rejected."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

API_GROUP = "rollout.dev"
API_VERSION: Final = "rollout.dev/v1alpha1"


class ApiModel(BaseModel):
    """Base class of all API types. Field docstrings become descriptions in the JSON schema (json_schema.py)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )

    def wire(self) -> dict[str, Any]:
        """Return the JSON form: camelCase names, without fields that are None."""
        return self.model_dump(mode="json", exclude_none=True)


def problems_in(error: ValidationError, whole: str = "") -> list[str]:
    """Return pydantic's errors as `field: message`. `whole` stands for the field of an error that has none."""
    found = [(".".join(map(str, each["loc"])) or whole, each["msg"]) for each in error.errors(include_url=False)]
    return [f"{field}: {message}" if field else message for field, message in found]


def exactly_one(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless exactly one of these fields has a value. The message names the fields that have one."""
    names, given = list(fields), [name for name, value in fields.items() if value is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise ValueError(f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be given; {found}")


def named_program(command: list[str]) -> list[str]:
    """Return a program and its arguments, of which any may be empty. Raises ValueError if the program's name is."""
    if command and not command[0]:
        raise ValueError("the first item is empty; expected the name of a program")
    return command


def distinct(key: str, message: str) -> AfterValidator:
    """Reject lists in which two entries are equal in attribute `key`. The value is formatted into the message."""

    def check(entries: Sequence[Any]) -> Sequence[Any]:
        seen: set[Any] = set()
        for value in (getattr(entry, key) for entry in entries):
            if value in seen:
                raise ValueError(message.format(value))
            seen.add(value)
        return entries

    return AfterValidator(check)


# Kubernetes object names are DNS labels here, not subdomains: they become parts of pod names and label values.
OBJECT_NAME_LENGTH: Final = 52
ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=OBJECT_NAME_LENGTH)
]
"""A DNS-1123 label. A maximum of 52 leaves 11 of the 63 characters for the suffixes of pods."""


def object_name(text: str, suffix: str = "", default: str = "job") -> str:
    """Return the nearest ObjectName to a text, with a suffix; `default` for a text without letters and digits.

    A long text is cut and gets a digest, so that texts that differ only after the cut have different names.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or default
    most = OBJECT_NAME_LENGTH - len(suffix)
    if len(name) > most:
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{name[: most - len(digest) - 1].strip('-')}-{digest}"
    return name + suffix


Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]

TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+=-]*$", max_length=200)]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
LongText = Annotated[str, StringConstraints(max_length=204_800)]
Command = Annotated[str, StringConstraints(min_length=1, max_length=65_536, pattern=r"\S")]
"""A shell command. A blank one would succeed without doing anything, and so pass every task that it grades."""
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Seconds = Annotated[int, Field(ge=1, le=604_800)]
"""Whole seconds, at most a week."""

Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[MGTP]|[KMGTP]i)?$", max_length=32)]
"""A Kubernetes resource quantity, such as `500m`, `2`, `512Mi`."""

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGTP", start=1)
}


def quantity_value(quantity: str) -> float:
    """Return the number of a quantity: bytes for memory, cores for cpu."""
    if quantity.endswith("m"):
        return float(quantity[:-1]) / 1000
    digits = quantity.rstrip("kKMGTPi")
    return float(digits) * float(_UNITS[quantity[len(digits) :]])


MEBIBYTE = 2**20


def quantity(count: int) -> str:
    """Format bytes exactly and readably, as in `kubectl describe`."""
    return f"{count // MEBIBYTE}Mi" if count % MEBIBYTE == 0 else str(count)

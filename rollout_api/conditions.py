"""Kubernetes object metadata and conditions, reduced to the fields that this project reads and writes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from rollout_api.base import ApiModel, Namespace, ObjectName


def _is_a_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Timestamp = Annotated[
    str,
    StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?Z$", max_length=32),
    AfterValidator(_is_a_time),
]
"""RFC 3339 in UTC, as Kubernetes writes it."""


class Metadata(ApiModel):
    """Object metadata. Other fields that the API server adds are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: ObjectName
    """Name of the object."""
    namespace: Namespace | None = None
    """Namespace; empty on a laptop."""
    uid: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Set by the API server, or by the first run of a job on a laptop."""
    labels: dict[str, Annotated[str, StringConstraints(max_length=63)]] = {}
    """Labels."""
    annotations: dict[str, str] = {}
    """Annotations."""


class Condition(ApiModel):
    """One observation of an object's state, as Kubernetes' API conventions describe it."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """What is observed."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition is true."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    """Machine-readable reason, in one word."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Explanation for people."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec to which this condition applies."""
    last_transition_time: Timestamp | None = None
    """When the status last changed, RFC 3339."""


def true_conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the conditions that are True, by type."""
    return {found["type"]: found for found in status.get("conditions") or () if found["status"] == "True"}

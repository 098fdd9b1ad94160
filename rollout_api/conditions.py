"""Kubernetes object metadata and conditions, as far as this project reads and writes them."""

from datetime import datetime
from typing import Annotated, Literal

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
    """Object metadata. What the API server adds to it is accepted and left out."""

    model_config = ConfigDict(extra="ignore")

    name: ObjectName
    """Name of the object."""
    namespace: Namespace | None = None
    """Namespace; a laptop has none."""
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
    """Whether it holds."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    """Why, one word for machines."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Why, for people."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that was looked at."""
    last_transition_time: Timestamp | None = None
    """When the status last changed, RFC 3339."""

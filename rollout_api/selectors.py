"""Label selectors in Kubernetes' format."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from rollout_api.base import ApiModel

_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=rf"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_NAME}$", max_length=317)]
LabelValue = Annotated[str, StringConstraints(pattern=rf"^({_NAME})?$", max_length=63)]


class SelectorOperator(StrEnum):
    """`In`, `NotIn`: the label's value is, or is not, one of `values`. `Exists`, `DoesNotExist`: the label is present,
    or absent.
    """

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(ApiModel):
    """One condition on a label."""

    key: LabelKey
    """Key of the label."""
    operator: SelectorOperator
    """Comparison of the label."""
    values: Annotated[list[LabelValue], Field(max_length=64)] = []
    """For In and NotIn: the values, at least one."""

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if (self.operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)) != bool(self.values):
            raise ValueError(f"is {self.operator}; values are needed for operators In and NotIn, and for no other")
        return self


class LabelSelector(ApiModel):
    """Selects objects whose labels meet all conditions. An empty selector selects all."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    """Labels that must have these values."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=32)] = []
    """Further conditions on labels."""

    def wire(self) -> dict[str, Any]:
        """Return the JSON form with the fields that were set."""
        return self.model_dump(mode="json", exclude_unset=True)


class NetworkPeer(ApiModel):
    """Pods, as a NetworkPolicy selects them; both selectors together select pods of certain namespaces."""

    pod_selector: LabelSelector | None = None
    """Selects pods; all pods of the selected namespaces when left out."""
    namespace_selector: LabelSelector | None = None
    """Selects namespaces; the ModelServer's own when left out."""

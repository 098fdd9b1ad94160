"""What a plan may ask for. Plans are data: `plan` functions make them from what was observed, the loop carries them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollout_api.cluster import KEY_FILE

if TYPE_CHECKING:
    from rollout_operator.model_server.operations import LoadOptions
    from rollout_operator.model_server.update_state import Server, ServerOperation

Manifest = Mapping[str, Any]
"""A Kubernetes object as JSON."""

Fact = tuple[str, ...]
"""Name of something learned, such as ("overlay-refused", namespace)."""


@dataclass(frozen=True)
class Ref:
    """One object, by name. The namespace of a cluster-scoped one is empty."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Remember:
    """Keep a fact in the operator's memory for a while. Nothing is written: a new operator learns it again."""

    fact: Fact
    message: str
    """In the words of whoever said it."""
    seconds: float


@dataclass(frozen=True)
class Create:
    """Create an object. One that exists already and has the same controller is as good as created."""

    body: Manifest
    if_refused: Remember | None = None
    """What to learn when the API server refuses it (Pod Security, a policy, an unknown field) instead of failing; the
    message is then the API server's. The object is planned again at once."""

    @property
    def ref(self) -> Ref:
        metadata = self.body["metadata"]
        return Ref(self.body["kind"], metadata["namespace"], metadata["name"])


@dataclass(frozen=True)
class EnsureKey:
    """Create a Secret with the owner's key in it (a new random one, unless it is known), unless it exists, and read the key;
    planned again at once when the key was not known."""

    body: Manifest
    """The Secret, without its key."""
    field: str = KEY_FILE
    """Field of the Secret in which the key is."""


@dataclass(frozen=True)
class ReadKey:
    """Read the key of a Secret that exists; planned again at once when the key was not known."""

    ref: Ref
    owner_uid: str
    """Uid of its controller: the Secret of an earlier object of the same name is no answer."""


@dataclass(frozen=True)
class Delete:
    """Delete an object, if it is still the one with that uid. Its dependents go with it, in the background."""

    ref: Ref
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class Patch:
    """Merge-patch an object."""

    ref: Ref
    change: Manifest


@dataclass(frozen=True)
class Replace:
    """Write an object anew, whole, if it is still the one that was seen (its uid and resourceVersion are in the body)."""

    body: Manifest

    @property
    def ref(self) -> Ref:
        metadata = self.body["metadata"]
        return Ref(self.body["kind"], metadata["namespace"], metadata["name"])


@dataclass(frozen=True)
class SetPodCondition:
    """Set a condition in a pod's status, for a readiness gate, if it is still the pod with that uid."""

    ref: Ref
    uid: str
    condition: Manifest
    """With type, status, reason, message, lastTransitionTime."""


@dataclass(frozen=True)
class Ask:
    """Begin an operation on model servers. It may take minutes: the object is planned again when it is over."""

    operation: "ServerOperation"
    servers: "tuple[Server, ...]"
    options: "LoadOptions"


@dataclass(frozen=True)
class Event:
    """Something that a person would want to read in `kubectl describe`. Equal ones are counted, not repeated."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = Create | EnsureKey | ReadKey | Remember | Delete | Patch | Replace | SetPodCondition | Ask


@dataclass(frozen=True)
class Plan:
    """What to do about one object now. A plan that is carried out and made again is empty."""

    actions: tuple[Action, ...] = ()
    """In this order, deletes last. After one that fails nothing more is made, for it may need what is missing; all else is
    done, and the round is tried again with back-off."""
    status: Manifest | None = None
    """The operator's part of the object's status, whole; written when it differs from what was observed."""
    events: tuple[Event, ...] = ()
    requeue_seconds: float | None = None
    """Look again after so long even if nothing changes: a deadline is due then."""

"""Actions that a plan can contain. `plan` functions create them from observed state; the loop executes them."""

from dataclasses import dataclass, field
from typing import Literal

from rollout_api.cluster import KEY_FILE
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.server_contact import LoadOptions, Server, ServerOperation

Fact = tuple[str, ...]
"""Name of a learned fact, such as ("overlay-refused", namespace)."""


@dataclass(frozen=True)
class Ref:
    """Reference to one object. The namespace of a cluster-scoped object is empty."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"

    @classmethod
    def of(cls, kind: str, obj: Manifest) -> "Ref":
        metadata = obj["metadata"]
        return cls(kind, metadata.get("namespace", ""), metadata["name"])


@dataclass(frozen=True)
class Remember:
    """Keep a fact in the operator's memory for a while. It is not persisted: after a restart the operator learns it
    again.
    """

    fact: Fact
    message: str
    """Message of the component that reported the fact."""
    seconds: float


@dataclass(frozen=True)
class Create:
    """Create an object. If it exists already with the same controller, that counts as success."""

    body: Manifest
    if_refused: Remember | None = None
    """Fact to learn, instead of failing, when the API server refuses the object (Pod Security, a policy, an unknown
    field). Its message is the API server's. The object is planned again at once.
    """

    @property
    def ref(self) -> Ref:
        return Ref.of(self.body["kind"], self.body)


@dataclass(frozen=True)
class EnsureKey:
    """Ensure that a Secret with the owner's key exists, and read the key. A new key is random unless the operator
    already knows one. The object is planned again at once if the key was unknown.
    """

    body: Manifest
    """The Secret, without its key."""
    field: str = KEY_FILE
    """Field of the Secret that holds the key."""
    remedy: str | None = None
    """None if nothing uses the key. Otherwise a new one would lock the operator out of what runs, so a missing Secret is
    created again only if its key is known; this says what to do.
    """


@dataclass(frozen=True)
class ReadKey:
    """Read the key of an existing Secret. The object is planned again at once if the key was unknown."""

    ref: Ref
    owner_uid: str
    """Uid of the Secret's controller. A Secret of an earlier object with the same name is ignored."""


@dataclass(frozen=True)
class Delete:
    """Delete an object if its uid still matches. Dependents are deleted after it, or before it with `foreground`."""

    ref: Ref
    uid: str
    grace_seconds: int | None = None
    foreground: bool = False


@dataclass(frozen=True)
class Patch:
    """Merge-patch an object."""

    ref: Ref
    change: Manifest


@dataclass(frozen=True)
class Replace:
    """Replace a whole object if it is unchanged since it was read (the body has its uid and resourceVersion)."""

    body: Manifest

    @property
    def ref(self) -> Ref:
        return Ref.of(self.body["kind"], self.body)


@dataclass(frozen=True)
class SetPodCondition:
    """Set a condition in a pod's status, for a readiness gate, if the pod's uid still matches."""

    ref: Ref
    uid: str
    condition: Manifest
    """Has type, status, reason, message and lastTransitionTime."""


@dataclass(frozen=True)
class Ask:
    """Begin an operation on model servers. It can take minutes: the object is planned again when the operation ends."""

    operation: ServerOperation
    servers: tuple[Server, ...]
    options: LoadOptions


@dataclass(frozen=True)
class Still:
    """Have an executor become still for a parking, or let it accept changes again."""

    parking: int
    is_still: bool = True
    idle_seconds: int = 0
    """It does not become still if it was used less than this ago."""


@dataclass(frozen=True)
class ExecutorRequest:
    """What to ask of an executor: of a SandboxPool's Sandbox its use, of another one to be `still`."""

    namespace: str
    name: str
    uid: str
    """Namespace, name and uid of its Sandbox."""
    address: str
    token: str = field(repr=False)
    drain: bool = False
    """Have it refuse further workspaces."""
    jobs: frozenset[str] = frozenset()
    """Jobs of the namespace that may have workspaces, as `job_tag`."""
    still: Still | None = None
    forget: frozenset[str] = frozenset()
    """Jobs whose workspaces are left over, as `job_tag`: they are destroyed."""


@dataclass(frozen=True)
class AskExecutors:
    """Begin requests to executors. The pool or Sandbox is planned again when they have ended."""

    requests: tuple[ExecutorRequest, ...]


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event, shown by `kubectl describe`. Repeated Events increase a count."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = Create | EnsureKey | ReadKey | Remember | Delete | Patch | Replace | SetPodCondition | Ask | AskExecutors


@dataclass(frozen=True)
class Plan:
    """The actions for one object. Executing a plan makes the next one empty."""

    actions: tuple[Action, ...] = ()
    """Executed in this order, deletes last. After a failed action, creates are skipped because they may depend on it;
    other actions still run. The round is retried with back-off.
    """
    status: Manifest | None = None
    """The operator's complete part of the object's status. It is written when it differs from the observed status."""
    events: tuple[Event, ...] = ()
    requeue_seconds: float | None = None
    """Plan again after this time even if nothing changes, because a deadline is due then."""

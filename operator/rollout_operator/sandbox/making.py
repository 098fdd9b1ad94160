"""Decide how to create the pod of a Sandbox, given earlier refusals by the API server. No side effects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.cluster import MANAGED_BY, NETWORK_LABEL, SANDBOX_LABEL, by_hand_name, parking_labels
from rollout_api.conditions import Condition
from rollout_api.on_cluster.objects import Json, owned_object, owner_reference
from rollout_api.on_cluster.operator_config import Images
from rollout_api.on_cluster.sandbox_pod import ADMISSION_REFUSED, Choice, Identity, choose_mode, pod_for
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from rollout_operator.actions import Action, Create, EnsureKey, ReadKey, Remember
from rollout_operator.conditions import condition, find
from rollout_operator.sandbox import network, validate
from rollout_operator.sandbox.observe import Observed, image_volumes_refused, overlay_refused, pod_refused
from rollout_operator.sandbox.reasons import OVERLAY
from rollout_operator.sandbox.status import mode_of
from rollout_operator.world import is_by_admission, operator_peer

LEARNED_SECONDS = 3600.0
"""Time for which failures of an image or the cluster are remembered. Later they may have been fixed."""
ADMISSION_SECONDS = 60.0
"""Time for which refusals by admission are remembered. It is short, because labels of a new namespace may be set after
its first Sandbox, and a retry costs only one refused create.
"""
REFUSAL_SECONDS = 20.0
"""Time for which a refused variant of a Sandbox's pod is not tried again. By then most pods run, and `learned_refusals` has
extended the refusal to the namespace or the cluster.
"""


@dataclass(frozen=True)
class Invalid:
    """No pod can be created."""

    message: str
    conditions: Sequence[Condition] = ()
    may_pass: bool = False
    """Whether a retry may succeed, because admission refused the pod. Labels of a new namespace may be set later."""


@dataclass(frozen=True)
class _PodVariant:
    """A mode, and how the executor gets into the pod."""

    choice: Choice
    image_volume: bool


def make_pod(seen: Observed, spec: SandboxSpec) -> tuple[Action, ...] | Invalid:
    """Return the actions that create the pod and its prerequisites, in order."""
    if wrong := validate.problems(spec, seen.owner, seen.namespace, seen.config.privileged_namespaces):
        return Invalid("; ".join(wrong))
    user_template = validate.pod_template(spec, seen.owner)
    variant = _choose_variant(seen, spec)
    if isinstance(variant, Invalid):
        return variant
    if seen.key is None:
        return (key_action(seen),)
    digest = network.reach_of(spec.network).digest()
    who = Identity(seen.name, seen.namespace, seen.uid, key=seen.key, owner_labels=_owner_labels(seen), network=digest)
    try:
        pod = pod_for(who, spec, variant.choice, _images(seen), user_template, image_volume=variant.image_volume)
    except ValueError as error:
        return Invalid(f"spec.podTemplate.spec.{error}")
    refused = Remember(pod_refused(seen.uid, (variant.choice.mode, variant.image_volume)), "", REFUSAL_SECONDS)
    return (*missing_policy(seen, spec), Create(pod, if_refused=refused))


def _images(seen: Observed) -> Images:
    images, own = seen.config.images, seen.owner and seen.owner.executor_image
    return images.model_copy(update={"executor": own}) if own else images


def learned_refusals(seen: Observed) -> tuple[Remember, ...]:
    """Return facts about the namespace, if a pod was admitted after other variants of it were refused.

    A refusal alone proves nothing about a namespace, because a broken template is refused in every variant.
    """
    if seen.pod is None or not seen.refusals:
        return ()
    mode, learned = mode_of(seen.pod), []
    overlay = [words for (refused, _), words in seen.refusals.items() if refused == WorkspaceMode.OVERLAY]
    if mode == WorkspaceMode.PLAIN and overlay and seen.overlay_refusal is None:
        learned.append(Remember(overlay_refused(seen.namespace), overlay[0], ADMISSION_SECONDS))
    if (mode, True) in seen.refusals and seen.image_volumes_refusal is None:
        learned.append(Remember(image_volumes_refused(seen.namespace), seen.refusals[mode, True], LEARNED_SECONDS))
    return tuple(learned)


def _choose_variant(seen: Observed, spec: SandboxSpec) -> _PodVariant | Invalid:
    """Return the first variant that was not refused: Overlay before Plain, an image volume before an init container."""
    asked = spec.workspaces.mode
    choice = choose_mode(
        asked,
        seen.nodes,
        handler=spec.runtime_class_name or "",
        admission_refusal=seen.overlay_refusal,
        trial_failure=seen.trial_failure,
    )
    earlier = find(seen.status.conditions, OVERLAY)
    if earlier is not None and earlier.status == "False":  # an Overlay pod of this Sandbox has failed
        choice = Choice(WorkspaceMode.PLAIN, earlier.reason, earlier.message)
    variant = _first_variant_not_refused(seen, choice)
    if choice.mode == WorkspaceMode.OVERLAY and isinstance(variant, str):
        choice = Choice(WorkspaceMode.PLAIN, ADMISSION_REFUSED, variant)
        variant = _first_variant_not_refused(seen, choice)
    if asked == WorkspaceMode.OVERLAY and choice.mode == WorkspaceMode.PLAIN:
        why = f"{choice.reason}: {choice.message}"
        # The rule may refuse every pod, so Plain is advised without reservation only where Plain pods were admitted.
        may_refuse_plain = choice.reason == ADMISSION_REFUSED and seen.overlay_refusal is None
        remedy = (
            "correct what is refused, or use Auto, which also tries Plain" if may_refuse_plain else "use Auto or Plain"
        )
        return Invalid(
            f"spec.workspaces.mode: Overlay is unavailable here ({why}); {remedy}",
            (condition(OVERLAY, False, choice.reason, choice.message),),
            may_pass=is_by_admission(choice.message),
        )
    if not isinstance(variant, str):
        return variant
    hint = "; set spec.user to a uid such as 1000" if "runAsNonRoot" in variant else ""
    return Invalid(f"the API server refused its pod: {variant}{hint}", may_pass=is_by_admission(variant))


def _first_variant_not_refused(seen: Observed, choice: Choice) -> _PodVariant | str:
    """Return the first variant of this mode that was not refused, or why the last one was."""
    refusal = ""
    for image_volume in _deliveries(seen):
        words = seen.refusals.get((choice.mode, image_volume))
        if words is None:
            return _PodVariant(choice, image_volume)
        refusal = words
    return refusal


def _deliveries(seen: Observed) -> tuple[bool, ...]:
    """Return how the executor can get into the pod: as an image volume (True), or copied by an init container (False).

    If any node cannot mount images, it is always copied, because the scheduler chooses the node later.
    """
    is_refused = seen.image_volumes_refusal is not None or seen.exec_failure is not None
    return (False,) if is_refused or seen.nodes.without_image_volumes else (True, False)


def key_action(seen: Observed) -> Action:
    """Return the action by which the operator learns the key of its executor."""
    secret = seen.key_secret
    if seen.owner is not None:
        return ReadKey(secret, seen.owner.uid)
    remedy = "Delete the Sandbox and create it again" if seen.pod is not None else None
    return EnsureKey(_with_owner(seen, secret.kind, secret.name, type="Opaque"), remedy=remedy)


def missing_policy(seen: Observed, spec: SandboxSpec) -> tuple[Create, ...]:
    """Return the action that creates the NetworkPolicy of its pod; empty if it exists."""
    reach = network.reach_of(spec.network)
    digest = reach.digest()
    if (owner := seen.owner) is None:
        name, pods = by_hand_name(seen.name), {SANDBOX_LABEL: seen.name, NETWORK_LABEL: digest}
        clients = spec.clients.wire() if spec.clients else None
    else:
        # The name for a pool never equals one for a job, which ends with hexadecimal digits.
        name = f"{owner.name}-net-{digest}{'-pool' if owner.is_pool else ''}"
        pods, clients = {**owner.pods, NETWORK_LABEL: digest}, {"matchLabels": owner.clients}
    if name in seen.policies:
        return ()
    callers = [] if clients is None else [{"podSelector": clients}]
    if spec.parking is not None:
        callers.append({"podSelector": {"matchLabels": parking_labels(seen.name)}})
    if (owner is not None and owner.is_pool) or spec.parking is not None:
        callers.append(operator_peer(seen.config))
    rules = network.policy_spec(pods, callers, reach, seen.config.dns)
    return (Create(_with_owner(seen, "NetworkPolicy", name, spec=rules)),)


def _with_owner(seen: Observed, kind: str, name: str, **body: Any) -> Json:
    """Return an object of the Sandbox's owner, or of a Sandbox that a person created."""
    if (by := seen.owner) is not None:
        owner, labels = owner_reference(by.kind, by.name, by.uid), by.labels
    else:
        owner, labels = owner_reference("Sandbox", seen.name, seen.uid), {SANDBOX_LABEL: seen.name}
    return owned_object(kind, name, seen.namespace, owner, {**MANAGED_BY, **labels}, **body)


def _owner_labels(seen: Observed) -> dict[str, str]:
    return seen.owner.labels if seen.owner else {}

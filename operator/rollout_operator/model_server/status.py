"""The status of a ModelServer: conditions, servers, and the progress of a policy update. Also its Events."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rollout_api.conditions import Condition
from rollout_api.manifest import Problem
from rollout_api.model_server import ModelServer, ModelServerStatus, PolicyStep
from rollout_operator.actions import Event
from rollout_operator.conditions import condition, find, with_timestamps
from rollout_operator.model_server.objects import WORKLOAD_KINDS, download_name, selector, url
from rollout_operator.model_server.observe import Download, Observed
from rollout_operator.model_server.policy import Decision

INVALID, DOWNLOADED, POLICY_LOADED, READY = "Invalid", "Downloaded", "PolicyLoaded", "Ready"
INFERENCE_POOL = "InferencePool"

Claim = tuple[str, bool, str, str]
"""Type, whether it is true, reason, message."""


def invalid(seen: Observed, problems: Sequence[Problem], decision: Decision | None = None) -> dict[str, Any]:
    """Return the status of an invalid ModelServer. Its objects are not changed. With a `decision`, a policy update in
    progress continues.
    """
    claims: list[Claim] = [(INVALID, True, "InvalidSpec", "the spec is not applied: " + "; ".join(map(str, problems)))]
    update: dict[str, Any] = {"observed_generation": seen.generation}
    if decision is not None:
        claims.append((POLICY_LOADED, decision.settled, decision.reason, decision.message))
        update |= {"servers": list(decision.servers), "policy": decision.policy, "adapters": dict(decision.adapters)}
    new_types = {kind for kind, *_ in claims}
    kept = [condition for condition in seen.status.conditions if condition.type not in new_types]
    status = seen.status.model_copy(update={**update, "conditions": [*kept, *_conditions(seen, claims)]})
    return status.wire()


def status_of(seen: Observed, server: ModelServer, decision: Decision, *, downloaded: bool) -> dict[str, Any]:
    claims = [
        (DOWNLOADED, *_downloaded(seen, server, downloaded)),
        (POLICY_LOADED, decision.settled, decision.reason, decision.message),
        (READY, *_ready(seen, server, decision, downloaded)),
    ]
    if server.spec.inference_pool is not None:
        claims.append((INFERENCE_POOL, *_inference_pool(seen)))
    return ModelServerStatus(
        observed_generation=seen.generation,
        conditions=_conditions(seen, claims),
        url=url(server),
        servers=list(decision.servers),
        policy=decision.policy,
        adapters=dict(decision.adapters),
        replicas=len(seen.servers),
        selector=",".join(f"{label}={value}" for label, value in selector(server).items()),
    ).wire()


def events_of(seen: Observed, status: dict[str, Any]) -> tuple[Event, ...]:
    """Return the Events for the changes in a status that is about to be written."""
    return tuple(_events(seen, ModelServerStatus.model_validate(status)))


def _events(seen: Observed, now: ModelServerStatus) -> Iterator[Event]:
    for new in now.conditions:
        was = find(seen.status.conditions, new.type)
        if was is not None and (was.status, was.reason) == (new.status, new.reason):
            continue
        if new.type == INVALID or new.reason in _WARNING_REASONS:
            yield Event("Warning", new.reason, new.message)
        elif new.status == "True" and new.message:
            yield Event("Normal", new.reason, new.message)


_WARNING_REASONS: Final = frozenset(
    (
        *("DownloadFailed", "CannotCreate", "Unschedulable", "ImagePullBackOff", "CrashLoopBackOff"),
        *("FetchFailed", "RollingBack", "LoadFailed", "NotEnoughServers", "AdapterFailed"),
    )
)
"""Condition reasons that cause an Event of type Warning. Other Events are recorded only when a condition becomes True."""


def _downloaded(seen: Observed, server: ModelServer, downloaded: bool) -> tuple[bool, str, str]:
    download = seen.download
    if download is None:
        if downloaded:
            return True, "NotNeeded", ""
        return False, "Downloading", f"fetching {server.spec.weights_uri}"
    if downloaded:
        return True, "Downloaded", f"{server.spec.weights_uri} is in the cache"
    return False, *_download_trouble(seen, server, download)


def _download_trouble(seen: Observed, server: ModelServer, download: Download) -> tuple[str, str]:
    if download.failed is not None:
        job = download_name(seen.ref.name)
        return "DownloadFailed", f"{download.failed}; delete Job {job} to try again"
    if download.trouble is not None:
        return download.trouble
    words = f"fetching {server.spec.weights_uri}"
    return (
        "Downloading",
        words if download.has_pod else f"{words}; {_no_pod(seen, 'job', download_name(seen.ref.name))}",
    )


def _no_pod(seen: Observed, kind: str, name: str) -> str:
    """Return where to find why there is no pod: only Events of its controller say that a quota or admission refuses it."""
    return f"no pod yet: kubectl describe {kind} {name} -n {seen.ref.namespace}"


def _ready(seen: Observed, server: ModelServer, decision: Decision, downloaded: bool) -> tuple[bool, str, str]:
    wanted, ready = server.spec.replicas, sum(entry.ready for entry in decision.servers)
    words = f"{ready} of {wanted} servers are ready"
    if wanted == 0:
        return False, "NoReplicas", "spec.replicas is 0"
    if decision.policy.step in (PolicyStep.SLEEPING, PolicyStep.ASLEEP, PolicyStep.WAKING):
        return False, "Asleep", "its servers release their memory while spec.asleep is true; calls wait"
    reason = "ServersStarting"
    if seen.start_problems:
        name, (reason, message) = min(seen.start_problems.items())
        words = f"{words}; {name} waits: {message or reason}"
    elif (lacking := wanted - len(seen.servers)) > 0:
        kinds = [kind for kind in WORKLOAD_KINDS if (kind, seen.ref.name) in seen.objects]
        words += "".join(f"; {lacking} have {_no_pod(seen, kind.lower(), seen.ref.name)}" for kind in kinds)
    if ready >= server.spec.min_ready:
        return True, "ServersReady", words
    if not downloaded:
        return False, *_downloaded(seen, server, downloaded)[1:]
    if refusals := [seen.refusals[kind] for kind in WORKLOAD_KINDS if kind in seen.refusals]:
        return False, "CannotCreate", f"its pods cannot be created: {refusals[0]}"
    return False, reason, words


def _inference_pool(seen: Observed) -> tuple[bool, str, str]:
    if (INFERENCE_POOL, seen.ref.name) in seen.objects:
        return True, "Created", ""
    if (refusal := seen.refusals.get(INFERENCE_POOL)) is not None:
        return False, "CannotCreate", f"the InferencePool cannot be created: {refusal}"
    return False, "Creating", ""


def _conditions(seen: Observed, claims: Sequence[Claim]) -> list[Condition]:
    fresh = (condition(*claim) for claim in claims)
    return [with_timestamps(new, find(seen.status.conditions, new.type), seen.now, seen.generation) for new in fresh]

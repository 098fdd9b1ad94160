"""Plan one ModelServer: return actions for the observed state. No side effects.

control token ─► Services, NetworkPolicies, claim ─► download Job ─► pods ─► each verified, then Ready
                                                  (before accelerators are allocated)

Pods are replaced one at a time when the spec's fields for them have changed. A new policy is loaded into running pods.
"""

from collections.abc import Iterator
from typing import Any, Final

from rollout_api.cluster import MODEL_TOKEN_FILE, POLICY_LOADED, model_control_name
from rollout_api.model_server import ModelServer, ServerState
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.actions import (
    Action,
    Ask,
    Create,
    Delete,
    EnsureKey,
    Patch,
    Plan,
    Ref,
    Remember,
    Replace,
    SetPodCondition,
)
from rollout_operator.cache import uid_of
from rollout_operator.conditions import timestamp
from rollout_operator.model_server import policy
from rollout_operator.model_server.objects import (
    REFUSABLE_KINDS,
    WORKLOAD_KINDS,
    claim,
    download_job,
    noted_digest,
    optional_objects,
    owned,
    policies,
    services,
    weights,
)
from rollout_operator.model_server.observe import Observed, refused, secret_fact
from rollout_operator.model_server.pod import workload
from rollout_operator.model_server.policy import Decision
from rollout_operator.model_server.status import events_of, invalid, status_of
from rollout_operator.server_contact import LoadOptions

SECRET_SECONDS: Final = 60
"""Interval between checks that the Secret exists, while servers start that need it."""
REFUSED_SECONDS: Final = 60
"""Pause before a refused object is created again. By then a quota may have been raised, or its kind installed."""
_NEW_SERVERS: Final = (
    "Delete the pods of the ModelServer; the operator then creates a new token, with which new ones start"
)


def plan(seen: Observed) -> Plan:
    """Return the actions; none if the operator only has to wait."""
    if seen.is_deleted:
        return Plan()  # garbage collection deletes its objects
    server, problems = seen.server
    if server is None or (problems and not seen.objects):
        status = invalid(seen, problems)
        return Plan(status=status, events=events_of(seen, status))
    key = EnsureKey(
        control_secret(server), MODEL_TOKEN_FILE, _NEW_SERVERS if any(server.up for server in seen.servers) else None
    )
    if seen.token is None:
        return Plan((key,))
    if _waits(seen) and not seen.secret_checked:
        # A pod waits without any message for a Secret that was deleted.
        return Plan((Remember(secret_fact(seen.uid), "", SECRET_SECONDS), key))
    downloaded = is_downloaded(seen, server)
    decision = policy.decide(seen.policy(server))
    # Running servers are verified and updated even if the spec is invalid, because jobs wait for them.
    options = load_options(seen, server)
    actions: list[Action] = [*_servers(seen, decision)]
    actions += [Ask(task.operation, task.servers, options) for task in decision.tasks]
    if problems:
        status = invalid(seen, problems, decision)
    else:
        status = status_of(seen, server, decision, downloaded=downloaded)
        actions = [*_objects(seen, server, downloaded), *actions]
    deadlines = [decision.requeue_seconds, SECRET_SECONDS if _waits(seen) else None]
    requeue = min((seconds for seconds in deadlines if seconds is not None), default=None)
    return Plan(tuple(actions), status, events_of(seen, status), requeue)


def needs_spec(seen: Observed) -> bool:
    """Whether the plan needs a spec that is too large for the cache, because servers exist."""
    return seen.is_partial and bool(seen.objects)


def _waits(seen: Observed) -> bool:
    """Whether a server has not started yet."""
    return any(not server.up and not server.leaving for server in seen.servers)


def control_secret(server: ModelServer) -> dict[str, Any]:
    """Return the Secret of the control port, without its token."""
    return owned(server, "Secret", model_control_name(server.metadata.name), type="Opaque", immutable=True)


def is_downloaded(seen: Observed, server: ModelServer) -> bool:
    """Whether pods may be created: the weights are downloaded, or each pod downloads them itself."""
    if any((kind, seen.ref.name) in seen.objects for kind in WORKLOAD_KINDS):
        return True
    if download_job(server, seen.config) is None:
        return True
    return seen.download is not None and seen.download.done


def _objects(seen: Observed, server: ModelServer, downloaded: bool) -> Iterator[Action]:
    for body in (*services(server), *policies(server, seen.config)):
        yield from _create_or_replace(seen, body)
    for kind, optional in optional_objects(server).items():
        if optional is not None:
            yield from _create_or_replace(seen, optional)
        elif (old := seen.objects.get((kind, seen.ref.name))) is not None:
            yield Delete(Ref(kind, seen.ref.namespace, seen.ref.name), uid_of(old))
    # A claim and a Job are immutable, and so are the fields that they are built from.
    for fixed in (claim(server), download_job(server, seen.config)):
        if fixed is not None and not downloaded and _found(seen, fixed) is None:
            yield Create(fixed)
    if downloaded:
        yield from _workload(seen, server)


def _workload(seen: Observed, server: ModelServer) -> Iterator[Action]:
    body = workload(server, seen.config)
    found = _found(seen, body)
    if found is None or noted_digest(found) != noted_digest(body):
        yield from _create_or_replace(seen, body)
    elif found["spec"].get("replicas") != server.spec.replicas:
        yield Patch(Ref(body["kind"], seen.ref.namespace, seen.ref.name), {"spec": {"replicas": server.spec.replicas}})


def _servers(seen: Observed, decision: Decision) -> Iterator[Action]:
    """Delete pods and set readiness gates, but only as the written status already says. The next leader then knows what
    this one may have done.
    """
    written = {entry.uid: entry for entry in seen.status.servers}
    for server in seen.servers:
        before = written.get(server.uid)
        now = next((entry for entry in decision.servers if entry.uid == server.uid), None)
        if server.leaving or before is None or now is None:
            continue
        ref = Ref("Pod", seen.ref.namespace, server.name)
        if before.state is ServerState.EVICTED and now.state is ServerState.EVICTED:
            yield Delete(ref, server.uid)
        elif before.ready == now.ready != server.loaded:
            yield SetPodCondition(ref, server.uid, _policy_loaded(seen, now.ready, now.state))


def load_options(seen: Observed, server: ModelServer) -> LoadOptions:
    transfer = server.spec.weight_transfer
    return LoadOptions(
        namespace=seen.ref.namespace,
        mode=transfer.mode,
        model=server.spec.model.name,
        model_path=weights(server, seen.config).path,
        fetch_seconds=transfer.pull.timeout_seconds,
        hook=transfer.push.hook if transfer.push else None,
        push_seconds=transfer.push.timeout_seconds if transfer.push else 0,
        world_size=server.spec.parallelism.accelerators,
        update=seen.status.policy.update,
        token=seen.token or "",
        engine=server.spec.engine.description,
        sleeps=server.spec.sleep,
    )


def _policy_loaded(seen: Observed, ready: bool, state: ServerState) -> dict[str, str]:
    return {
        "type": POLICY_LOADED,
        "status": "True" if ready else "False",
        "reason": state.value,
        "lastTransitionTime": timestamp(seen.now),
    }


def _create_or_replace(seen: Observed, body: dict[str, Any]) -> Iterator[Action]:
    """Create the object, or replace it if it has changed."""
    found = _found(seen, body)
    kind = body["kind"]
    if found is None:
        if kind not in seen.refusals:
            fact = Remember(refused(seen.uid, kind), "", REFUSED_SECONDS)
            yield Create(body, if_refused=fact if kind in REFUSABLE_KINDS else None)
    elif noted_digest(found) != noted_digest(body):
        yield _replace(body, found)


def _found(seen: Observed, body: Manifest) -> Manifest | None:
    return seen.objects.get((body["kind"], body["metadata"]["name"]))


def _replace(body: dict[str, Any], found: Manifest) -> Replace:
    identity = {key: found["metadata"][key] for key in ("uid", "resourceVersion")}
    return Replace({**body, "metadata": {**body["metadata"], **identity}})

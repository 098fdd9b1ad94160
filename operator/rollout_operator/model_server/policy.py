"""The policy update as a state machine: decide the next step and the status to write. No side effects.

Open ─► Fetching ─► gate shut: Pausing ─► Acknowledging ─► Loading ─► Resuming ─► gate Open
             (Pull)                                      │       ▲  │
                                                         │  back to the old version, or on to a newer one
                        only for `spec.asleep`:          └─► Sleeping ─► Asleep ─► Waking ─► Loading

Two rules make it safe to lose the operator, or a write, at any point. First, a step sends requests only after the status
names the step, so a new operator knows what may have been done. Second, a step ends when the servers report its result,
not when a request was sent. docs/policy-updates.md has the details.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from rollout_api.model_server import (
    AdapterStatus,
    Gate,
    PolicySource,
    PolicyStatus,
    PolicyStep,
    ServerStatus,
    TransferMode,
)
from rollout_operator.model_server import adapters
from rollout_operator.model_server.update_state import (
    LOOK_AFTER_FAILURE,
    LOOK_AGAIN,
    MISMATCH,
    MOST_WORDS,
    Seen,
    entry_at_rest,
    entry_behind_gate,
    failed_lately,
    is_verified,
    must_be_replaced,
    next_operation,
    next_step,
    report_if_old,
    verified,
    with_deviating_weights,
)
from rollout_operator.server_contact import Call, Server, ServerOperation

# Twice the time of one attempt of a request, as in prime-rl (its src/prime_rl/utils/client.py).
PAUSE_LIMIT = timedelta(seconds=2 * 300)
RESUME_LIMIT = PAUSE_LIMIT
ACKNOWLEDGE_LIMIT = timedelta(seconds=10)
"""Time limit for runners. They normally acknowledge within 2 s (docs/model-routing.md). The update does not wait longer
for a runner that hangs.
"""
SILENCE_LIMIT = timedelta(seconds=60)
"""Time limit for a server that does not respond during an update, from the first failed Look: more than three time-outs.
"""
BEHIND_GATE_SECONDS = 1.0
"""Interval between plans while the gate is shut. Responses and acknowledgements cause further ones."""
MOST_MIXED = 1024
"""Most entries of `status.policy.mixed`."""


@dataclass(frozen=True)
class Task:
    """An operation and its servers: one server, or all of them for a load in mode Push."""

    operation: ServerOperation
    servers: tuple[Server, ...]


@dataclass(frozen=True)
class Decision:
    """The status to write and the operations to request."""

    policy: PolicyStatus
    servers: tuple[ServerStatus, ...]
    settled: bool
    """Status of the condition PolicyLoaded: whether the servers serve `spec.policy`."""
    reason: str
    message: str
    tasks: tuple[Task, ...] = ()
    requeue_seconds: float = LOOK_AGAIN.total_seconds()
    adapters: Mapping[str, AdapterStatus] = field(default_factory=dict)


def load_limit(seconds: float) -> timedelta:
    """Return the time limit of a load on all servers, given the limit of one attempt."""
    return timedelta(seconds=2 * seconds)


def decide(seen: Seen) -> Decision:
    """Decide the next step. With unchanged input, it requests only outstanding operations."""
    step = seen.status.policy.step
    decision = _STEPS[step](seen) if step is not None else _at_rest(seen)
    known = any(server.report is not None and server.report.adapters for server in seen.servers)
    return _and_adapters(seen, decision) if known or seen.adapters or seen.status.adapters else decision


def _and_adapters(seen: Seen, decision: Decision) -> Decision:
    """Add what is decided about adapters. What they need is asked only while the gate is open, of servers with no other
    task.
    """
    found = adapters.decide(seen, decision.servers)
    # A gateway must know the names of adapters before it gets calls.
    tasks = tuple(
        replace(task, operation=replace(task.operation, adapters=found.wanted))
        if task.operation.call is Call.OPEN
        else task
        for task in decision.tasks
    )
    decision = replace(decision, adapters=found.adapters, servers=found.servers, tasks=tasks)
    if not decision.policy.gate is seen.status.policy.gate is Gate.OPEN:
        return decision
    if decision.settled and found.message:
        reason = "AdapterFailed" if found.failed else "LoadingAdapters"
        decision = replace(decision, settled=False, reason=reason, message=found.message)
    busy = {server.key for task in decision.tasks for server in task.servers}
    asked = [Task(operation, (server,)) for server, operation in found.operations if server.key not in busy]
    soon = adapters.LOOK_AT_LOADS.total_seconds() if found.message else decision.requeue_seconds
    return replace(decision, tasks=(*tasks, *asked), requeue_seconds=min(decision.requeue_seconds, soon))


# One function for each step


def _at_rest(seen: Seen) -> Decision:
    policy = seen.status.policy
    if seen.wanted.version not in (policy.current, policy.failed):
        return _begin(seen)
    if seen.asleep:
        return _shut(seen, {"target": policy.current, "sources": [seen.source(policy.current)]})
    return _open(seen, policy if policy.sources else _at_version(seen, seen.wanted))


def _begin(seen: Seen) -> Decision:
    if not seen.members and not seen.asleep:
        # No server has calls, so the gate stays open, and servers load the version when they start. The new update number
        # tells runners that the version changed without their acknowledgement. A server that drains may still send tokens.
        changed = {"update": seen.status.policy.update + 1, "mixed": []}
        return _open(seen, _at_version(seen, seen.wanted).model_copy(update=changed))
    change: dict[str, Any] = {"target": seen.wanted.version, "sources": _sources(seen, seen.wanted)}
    if seen.asleep or seen.mode is TransferMode.PUSH or seen.wanted.uri is None:
        return _shut(seen, change)
    fetching = {"step": PolicyStep.FETCHING, "since": _now(seen)}
    return _open(seen, seen.status.policy.model_copy(update={**change, **fetching}))


def _fetching(seen: Seen) -> Decision:
    """Fetch the weights while the gate is open, because downloads take minutes and a wrong URI must not stop runners."""
    policy, members = seen.status.policy, seen.members
    if seen.wanted.version != policy.target or not members or seen.asleep:
        return _begin(seen)
    target = seen.source(policy.target)
    have = [server for server in members if server.report is not None and server.report.fetched == target.version]
    missing = [server for server in members if server not in have]
    failed = [server for server in missing if seen.failed(server, Call.FETCH, target.version)]
    if len(failed) == len(missing) and len(have) >= min(seen.min_ready, len(members)):
        return _shut(seen, {})
    tasks = [
        Task(ServerOperation(Call.FETCH, target), (server,))
        for server in missing
        if server.report is not None
        and server.busy is None
        and not failed_lately(seen, server, Call.FETCH, target.version)
    ]
    reason, words = "Fetching", f"version {target.version}: {len(have)} of {len(members)} servers have fetched it"
    if failed:
        reason, words = (
            "FetchFailed",
            f"{words}; {_why(failed, Call.FETCH)}; it is retried, and servers are unchanged",
        )
    return replace(_open(seen, policy, tasks), settled=False, reason=reason, message=words)


def _pausing(seen: Seen) -> Decision:
    policy, members = seen.status.policy, seen.members
    late = seen.now >= seen.since + PAUSE_LIMIT
    waiting = [server for server in members if not _is_paused(seen, server)]
    given_up = [server for server in waiting if late or _has_failed(seen, server, Call.PAUSE)]
    if len(given_up) == len(waiting):
        paused = {"paused": True, "step": PolicyStep.ACKNOWLEDGING, "since": _now(seen)}
        words = f"version {policy.target}: all servers are paused; runners determine which tokens have the old version"
        return _behind_gate(seen, policy.model_copy(update=paused), "Acknowledging", words, evicted=given_up)
    tasks = _tasks(seen, (server for server in waiting if server not in given_up), Call.PAUSE)
    words = f"version {policy.target}: {len(members) - len(waiting)} of {len(members)} servers are paused"
    return _behind_gate(seen, policy, "Pausing", words, tasks, given_up)


def _acknowledging(seen: Seen) -> Decision:
    policy = seen.status.policy
    unpaused = [server for server in seen.members if server.report is None or not server.report.paused]
    given_up = [server for server in unpaused if _has_failed(seen, server, Call.PAUSE)]
    waiting = sorted(runner.key for runner in seen.runners if runner.acknowledged != policy.update)
    if not unpaused and (not waiting or seen.now >= seen.since + ACKNOWLEDGE_LIMIT):
        change = policy.model_copy(update={"mixed": waiting[:MOST_MIXED]})
        return _next_step(seen, change, PolicyStep.SLEEPING if seen.asleep else PolicyStep.LOADING)
    tasks = _tasks(seen, (server for server in unpaused if server not in given_up), Call.PAUSE)
    words = f"version {policy.target}: {len(waiting)} of {len(seen.runners)} runners have not acknowledged"
    if waiting:
        words = f"{words}: {', '.join(waiting[:3])}{', …' if len(waiting) > 3 else ''}"
    return _behind_gate(seen, policy, "Acknowledging", words, tasks, given_up)


def _sleeping(seen: Seen) -> Decision:
    """Release the memory of all servers, also of those that start meanwhile, until `spec.asleep` is false."""
    policy, servers = seen.status.policy, [*seen.members, *seen.newcomers]
    if not seen.asleep:
        return _next_step(seen, policy, PolicyStep.WAKING)
    awake = [server for server in servers if server.report is None or not server.report.asleep]
    step = PolicyStep.SLEEPING if awake else PolicyStep.ASLEEP
    if step is not policy.step:
        return _next_step(seen, policy, step)
    asked = (server for server in awake if not failed_lately(seen, server, Call.SLEEP, policy.target))
    looks = ((server, report_if_old(seen, server)) for server in servers if server not in awake)
    tasks = _tasks(seen, asked, Call.SLEEP) + [Task(look, (server,)) for server, look in looks if look is not None]
    words = f"{len(servers) - len(awake)} of {len(servers)} servers have released their memory"
    if why := _why(awake, Call.SLEEP):
        words = f"{words}; {why}; it is retried"
    return _behind_gate(seen, policy, step.value, words, tasks)


def _waking(seen: Seen) -> Decision:
    policy = seen.status.policy
    late = seen.now >= seen.since + RESUME_LIMIT
    if seen.asleep:
        return _next_step(seen, policy, PolicyStep.SLEEPING)
    asleep = [server for server in seen.members if server.report is None or server.report.asleep is not False]
    given_up = [server for server in asleep if late or _has_failed(seen, server, Call.WAKE)]
    if len(given_up) == len(asleep):
        return _next_step(seen, policy, PolicyStep.LOADING, given_up)
    tasks = _tasks(seen, (server for server in asleep if server not in given_up), Call.WAKE)
    words = f"{len(seen.members) - len(asleep)} of {len(seen.members)} servers have their memory again"
    return _behind_gate(seen, policy, "Waking", words, tasks, given_up)


def _next_step(seen: Seen, policy: PolicyStatus, step: PolicyStep, evicted: Collection[Server] = ()) -> Decision:
    # Until weights are loaded, a newer version can replace the target.
    newer = _newer(seen) if step is PolicyStep.LOADING else {}
    change = policy.model_copy(update={"step": step, "since": _now(seen), **newer})
    return _behind_gate(seen, change, step.value, f"version {change.target}: {_BEGINS[step]}", evicted=evicted)


_BEGINS = {
    PolicyStep.SLEEPING: "all servers release their memory",
    PolicyStep.ASLEEP: "all servers have released their memory",
    PolicyStep.WAKING: "all servers take their memory back",
    PolicyStep.LOADING: "all servers load it",
}


def _loading(seen: Seen) -> Decision:
    """Load the weights. All servers are paused, and the version of all streamed tokens is known."""
    policy, members = seen.status.policy, seen.members
    target = seen.source(policy.target)
    late = seen.now >= seen.since + seen.load_limit
    have = [server for server in (*members, *seen.newcomers) if _has(server, target.version)]
    missing = [server for server in members if server not in have]
    failed = [
        server
        for server in missing
        if server.busy is None and (late or _has_failed(seen, server, Call.LOAD, target.version))
    ]
    if len(failed) == len(missing):
        return _after_loading(seen, have, failed)
    tasks = _load_tasks(seen, target, [server for server in missing if server not in failed])
    words = f"version {target.version}: {sum(s in members for s in have)} of {len(members)} servers have it"
    reason = "Loading" if target.version != policy.current or policy.failed is None else "RollingBack"
    return _behind_gate(seen, policy, reason, words, tasks)


def _after_loading(seen: Seen, have: list[Server], failed: list[Server]) -> Decision:
    """Handle the end of loading: every member has the target version, or failed to load it."""
    policy = seen.status.policy
    if seen.asleep:
        return _next_step(seen, policy, PolicyStep.SLEEPING)
    if newer := _newer(seen):
        change = policy.model_copy(update={"since": _now(seen), **newer})
        return _behind_gate(seen, change, "Loading", f"version {change.target}: newer than {policy.target}")
    hopeless = [server for server in seen.newcomers if seen.failed(server, Call.LOAD, policy.target)]
    why = f"; {_why([*failed, *hopeless], Call.LOAD) or 'no answer in time'}" if failed or hopeless else ""
    # Servers that have ended do not show that the target is bad, and a rollback would not restore them.
    if len(have) >= _servers_needed(seen) or (have and not failed and not hopeless):
        needed = min(policy.needed, len(have))
        resuming = policy.model_copy(update={"step": PolicyStep.RESUMING, "since": _now(seen), "needed": needed})
        words = f"version {policy.target}: {len(have)} servers have it and are resumed{why}"
        return _behind_gate(seen, resuming, "Resuming", words, evicted=failed)
    words = f"version {policy.target}: {len(have)} servers have it, {_servers_needed(seen)} are needed{why}"
    if policy.target != policy.current and (failed or hopeless):
        failure: dict[str, Any] = {"failed": policy.target, "failed_because": words[:MOST_WORDS]}
        if all(_is_unfetched(seen, server) for server in (*failed, *hopeless)):
            failure = {}  # that is no evidence against the version: it is fetched again with the gate open
        change = policy.model_copy(update={**failure, "target": policy.current, "needed": 1, "since": _now(seen)})
        return _behind_gate(seen, change, "RollingBack", f"{words}; all servers return to version {policy.current}")
    source = seen.source(policy.target)
    if kept := [server for server in failed if _may_roll_back_later(seen, server)]:
        again = [server for server in kept if not failed_lately(seen, server, Call.LOAD, source.version)]
        gone = [server for server in failed if server not in kept]
        return _behind_gate(seen, policy, "RollingBack", words, _load_tasks(seen, source, again), gone)
    return _behind_gate(seen, policy, "NotEnoughServers", words, _load_tasks(seen, source), failed)


def _resuming(seen: Seen) -> Decision:
    policy = seen.status.policy
    target = seen.source(policy.target)
    late = seen.now >= seen.since + RESUME_LIMIT
    back = [server for server in (*seen.members, *seen.newcomers) if _is_back(seen, server, target.version)]
    missing = [server for server in seen.members if server not in back]
    given_up = [
        server
        for server in missing
        if late
        or _has_failed(seen, server, Call.RESUME)
        or _has_failed(seen, server, Call.CHECK)
        or (server.report is not None and server.report.version != target.version)
    ]
    tasks = _load_tasks(seen, target)
    if len(given_up) < len(missing):
        tasks += _resume_tasks(seen, (server for server in missing if server not in given_up))
        words = f"version {target.version}: {len(back)} servers have resumed, {len(missing)} have not yet"
        return _behind_gate(seen, policy, "Resuming", words, tasks, given_up)
    # The entries still have the digests from before the load. In a rollback these digests are the expected ones.
    old = {entry.weights_digest for entry in seen.status.servers} if policy.target != policy.current else set()
    odd = with_deviating_weights(seen, back, old)
    good = [server for server in back if server not in odd]
    shut = [server for server in good if server.report is not None and not server.report.is_open]
    refused = [server for server in shut if server in seen.members and (late or _has_failed(seen, server, Call.OPEN))]
    if waiting := [server for server in shut if server in seen.members and server not in refused]:
        # Gateways open last: a server's weights are compared with those of the others before it gets calls.
        tasks += [Task(ServerOperation(Call.OPEN, target), (server,)) for server in waiting if server.busy is None]
        words = f"version {target.version}: {len(good) - len(shut)} of {len(good)} gateways accept calls again"
        return _behind_gate(seen, policy, "Resuming", words, tasks, [*given_up, *odd, *refused])
    given_up += refused
    good = [server for server in good if server not in shut]
    # Further servers may never get the target, for example if its files were deleted, so another request ends the wait.
    if len(good) >= _servers_needed(seen) or seen.asleep or _newer(seen):
        return _reopen(seen, good, [*given_up, *odd])
    why = f"{odd[0].name}: {MISMATCH}" if odd else _why(seen.newcomers, Call.LOAD)
    words = f"version {policy.target}: {len(good)} servers serve it, {_servers_needed(seen)} are needed"
    words = f"{words}; {why}" if why else words
    return _behind_gate(seen, policy, "NotEnoughServers", words, tasks, [*given_up, *odd])


_STEPS: dict[PolicyStep, Callable[[Seen], Decision]] = {
    PolicyStep.FETCHING: _fetching,
    PolicyStep.PAUSING: _pausing,
    PolicyStep.ACKNOWLEDGING: _acknowledging,
    PolicyStep.SLEEPING: _sleeping,
    PolicyStep.ASLEEP: _sleeping,
    PolicyStep.WAKING: _waking,
    PolicyStep.LOADING: _loading,
    PolicyStep.RESUMING: _resuming,
}


# Shared parts of the steps


def _shut(seen: Seen, change: dict[str, Any]) -> Decision:
    policy = seen.status.policy
    shut = {"gate": Gate.SHUT, "update": policy.update + 1, "paused": False, "mixed": []}
    step = {"step": PolicyStep.PAUSING, "since": _now(seen), "needed": min(seen.min_ready, len(seen.members))}
    new = policy.model_copy(update={**change, **shut, **step})
    return _behind_gate(seen, new, "Pausing", f"version {new.target}: all servers are being paused")


def _reopen(seen: Seen, good: Collection[Server], evicted: Collection[Server]) -> Decision:
    """Open the gate and mark the servers as ready in one write of the status, so that readers see both together."""
    policy = _at_version(seen, seen.source(seen.status.policy.target))
    servers = tuple(
        verified(seen, server, policy.current) if server in good else entry_behind_gate(seen, server, evicted)
        for server in _staying(seen)
    )
    return Decision(
        policy, servers, *_condition_without_update(seen, policy, servers), requeue_seconds=BEHIND_GATE_SECONDS
    )


def _open(seen: Seen, policy: PolicyStatus, tasks: Iterable[Task] = ()) -> Decision:
    """Decide while the gate is open: load the current version on new servers, evict failed or changed ones."""
    strange = [s for s in seen.members if s.report is not None and s.report.version != policy.current]
    odd = with_deviating_weights(seen, [server for server in seen.servers if is_verified(seen, server)])
    broken = [server for server in seen.newcomers if must_be_replaced(server, policy.current)]
    evicted = [*strange, *odd, *broken]
    of = entry_at_rest if policy.current == seen.status.policy.current else entry_behind_gate
    servers = tuple(of(seen, server, evicted) for server in _staying(seen))
    if policy != seen.status.policy:
        return Decision(
            policy, servers, *_condition_without_update(seen, policy, servers), requeue_seconds=BEHIND_GATE_SECONDS
        )
    resuming = (
        server
        for server in seen.members
        if server not in evicted
        and not any(failed_lately(seen, server, call, policy.current) for call in (Call.RESUME, Call.OPEN))
    )
    loading = _load_tasks(seen, seen.source(policy.current), evicted=evicted)
    asked = [*tasks, *loading, *_resume_tasks(seen, resuming)]
    busy = {server.key for task in tasks for server in task.servers}
    asked = [task for task in asked if task in tasks or not busy & {server.key for server in task.servers}]
    waits = any(server.up and server.report is None for server in seen.servers)
    requeue = LOOK_AFTER_FAILURE if waits else LOOK_AGAIN
    return Decision(
        policy, servers, *_condition_without_update(seen, policy, servers), tuple(asked), requeue.total_seconds()
    )


def _behind_gate(
    seen: Seen,
    policy: PolicyStatus,
    reason: str,
    message: str,
    tasks: Iterable[Task] = (),
    evicted: Collection[Server] = (),
) -> Decision:
    """Decide while the gate is shut. A decision that changes `policy` has no tasks, because the status must be written
    first.
    """
    if seen.has_lost_members:
        policy = policy.model_copy(update={"needed": min(policy.needed, _servers_needed(seen))})
    gone = [*evicted, *(server for server in seen.newcomers if must_be_replaced(server, policy.target))]
    servers = tuple(entry_behind_gate(seen, server, gone) for server in _staying(seen))
    asked = tuple(task for task in tasks if not any(server in gone for server in task.servers))
    return Decision(policy, servers, False, reason, message, asked, BEHIND_GATE_SECONDS)


def _load_tasks(
    seen: Seen, source: PolicySource, members: Sequence[Server] = (), evicted: Collection[Server] = ()
) -> list[Task]:
    """Return the operations that load a version on members, whose calls are paused, and on newcomers without calls."""
    tasks: list[Task] = []
    loads: list[Server] = []
    for server in (*members, *(newcomer for newcomer in seen.newcomers if newcomer not in evicted)):
        operation = _member_load(seen, server, source) if server in members else next_operation(seen, server, source)
        if (
            operation is not None
            and operation.call is Call.LOAD
            and seen.mode is TransferMode.PUSH
            and source.version > 0
        ):
            loads.append(server)
        elif operation is not None:
            tasks.append(Task(operation, (server,)))
    sending = any(server.busy is not None and server.busy.call is Call.LOAD for server in seen.servers)
    if loads and not sending:
        tasks.append(Task(ServerOperation(Call.LOAD, source), tuple(loads)))
    return tasks


def _tasks(seen: Seen, servers: Iterable[Server], call: Call) -> list[Task]:
    """Return a call for each server that is not busy; for one without a report, the report."""
    idle = [server for server in servers if server.busy is None]
    found = ((server, ServerOperation(call) if server.report else report_if_old(seen, server)) for server in idle)
    return [Task(operation, (server,)) for server, operation in found if operation is not None]


def _member_load(seen: Seen, server: Server, source: PolicySource) -> ServerOperation | None:
    if server.report is None:
        return report_if_old(seen, server)
    return (
        ServerOperation(Call.LOAD, source) if server.busy is None and server.report.version != source.version else None
    )


def _resume_tasks(seen: Seen, servers: Iterable[Server]) -> list[Task]:
    """Return the next operations that resume members with the right version."""
    found = ((server, _resume_operation(seen, server)) for server in servers)
    return [Task(operation, (server,)) for server, operation in found if operation is not None]


def _resume_operation(seen: Seen, server: Server) -> ServerOperation | None:
    if server.busy is not None or server.report is None:
        return report_if_old(seen, server)
    if (step := next_step(seen, server)) is not None:
        return step
    policy = seen.status.policy
    if policy.gate is Gate.OPEN and not server.report.is_open:
        return ServerOperation(Call.OPEN, seen.source(policy.current))
    return ServerOperation(Call.LOOK) if server.report.at < seen.since else report_if_old(seen, server)


def _is_paused(seen: Seen, server: Server) -> bool:
    return server.report is not None and server.report.paused and server.report.at >= seen.since


def _has_failed(seen: Seen, server: Server, call: Call, version: int | None = None) -> bool:
    """Whether an operation on a server failed, or the server has not responded for SILENCE_LIMIT.

    A silent server does not count as failed earlier, because it may have ended, which its pod will show. An engine does
    not respond while it loads weights. A silent server without a recorded failure of its load therefore never counts as
    failed here; `load_limit` applies.
    """
    failed = seen.failed(server, call, version) is not None
    if server.report is not None:
        return failed
    return _is_silent(seen, server) and (failed or call is not Call.LOAD)


def _is_unfetched(seen: Seen, server: Server) -> bool:
    """Whether a server could not load the target because it could not fetch it."""
    failure = seen.failed(server, Call.LOAD, seen.status.policy.target)
    return seen.mode is TransferMode.PULL and failure is not None and failure.untouched


def _may_roll_back_later(seen: Seen, server: Server) -> bool:
    """Whether to retry a failed rollback on a server instead of replacing its pod.

    Its weights are unchanged, for example because the trainer died. A new pod would take minutes to start and would then
    wait for the same trainer.
    """
    failure = seen.failed(server, Call.LOAD, seen.status.policy.target)
    patient = seen.mode is TransferMode.PUSH or seen.now < seen.since + seen.load_limit
    return failure is not None and failure.untouched and patient


def _is_silent(seen: Seen, server: Server) -> bool:
    if server.silent_since is None or server.busy is not None:
        return False
    return seen.now >= max(server.silent_since, seen.since) + SILENCE_LIMIT


def _has(server: Server, version: int) -> bool:
    return server.report is not None and server.busy is None and server.report.version == version


def _is_back(seen: Seen, server: Server, version: int) -> bool:
    report = server.report
    here = report is not None and report.version == version and report.at >= seen.since
    return here and next_step(seen, server) is None


def _servers_needed(seen: Seen) -> int:
    """Return how many servers must have the target before the gate opens. It is the recorded number, or less if the spec
    has been lowered or servers have ended.
    """
    needed = min(seen.status.policy.needed, seen.min_ready)
    return min(needed, max(1, len(seen.members))) if seen.has_lost_members else needed


def _newer(seen: Seen) -> dict[str, Any]:
    """Return the change to a newer version than the target; empty if none is wanted, or to try it again is too soon."""
    policy = seen.status.policy
    if seen.wanted.version <= max(policy.target, policy.failed or 0):
        return {}
    # A server remembers one failed load. If this update tried the version before, that may be the load of another one.
    tried = any(source.version == seen.wanted.version for source in policy.sources)
    if tried and any(failed_lately(seen, server, Call.LOAD) for server in (*seen.members, *seen.newcomers)):
        return {}
    needed = min(seen.min_ready, max(1, len(seen.members)))
    return {"target": seen.wanted.version, "sources": _sources(seen, seen.wanted), "needed": needed}


def _sources(seen: Seen, target: PolicySource) -> list[PolicySource]:
    current = seen.source(seen.status.policy.current)
    return [current, target] if target.version != current.version else [current]


def _at_version(seen: Seen, source: PolicySource) -> PolicyStatus:
    """Return the status without an update, at a version."""
    policy = seen.status.policy
    failed = policy.failed if policy.failed == seen.wanted.version != source.version else None
    return PolicyStatus(
        current=source.version,
        target=source.version,
        update=policy.update,
        mixed=policy.mixed,
        failed=failed,
        failed_because=policy.failed_because if failed is not None else None,
        sources=[source],
    )


def _condition_without_update(
    seen: Seen, policy: PolicyStatus, servers: Sequence[ServerStatus]
) -> tuple[bool, str, str]:
    ready = f"{sum(entry.ready for entry in servers)} of {len(servers)} servers serve version {policy.current}"
    if policy.failed is not None and policy.failed == seen.wanted.version:
        return False, "LoadFailed", f"{ready}; {policy.failed_because}; give spec.policy a higher version to try again"
    if policy.target != policy.current:
        return False, "Fetching", f"{ready}; version {policy.target} is being fetched"
    why = _why(seen.newcomers, Call.LOAD)
    if why and not any(entry.ready for entry in servers):
        return False, "Loading", f"{ready}; {why}"
    return True, "Loaded", ready


def _why(servers: Iterable[Server], call: Call) -> str:
    """Return one server's failure message; empty if none failed."""
    found = (server.failures.get(call) or server.failures.get(Call.LOOK) for server in servers)
    return next((failure.message for failure in found if failure is not None), "")


def _staying(seen: Seen) -> list[Server]:
    return [server for server in seen.servers if not server.leaving]


def _now(seen: Seen) -> str:
    return seen.now.isoformat(timespec="milliseconds").replace("+00:00", "Z")

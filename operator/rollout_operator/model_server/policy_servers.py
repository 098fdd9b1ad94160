"""What each server is good for, and what it is to be asked next to get there. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import timedelta

from rollout_api.model_server import Gate, PolicySource, ServerState, ServerStatus
from rollout_operator.model_server.policy_seen import Call, Errand, Seen, Server

LOOK_AGAIN = timedelta(seconds=10)
"""Between two looks at a server while no update is under way: a person may have paused it."""
TRY_AGAIN = timedelta(seconds=30)
"""After a failure that may lie with a store or with the trainer. Longer than a connection's time-out."""
LOOK_AFTER_FAILURE = timedelta(seconds=2)
"""An engine that starts answers within minutes; asking it costs nothing."""

_CHANGES = (Call.LOAD, Call.RESUME, Call.CHECK)
MISMATCH = "its weights differ from those of the other servers, though it names the same version"


def look(seen: Seen, server: Server) -> Errand | None:
    """The errand Look, if a server's last answer is missing or old and it is free."""
    if server.busy is not None or not server.control_url:
        return None
    if server.said is None:
        failed = server.failures.get(Call.LOOK)
        return None if failed and seen.now < failed.at + LOOK_AFTER_FAILURE else Errand(Call.LOOK)
    return Errand(Call.LOOK) if seen.now >= server.said.at + LOOK_AGAIN else None


def next_errand(seen: Seen, server: Server, source: PolicySource) -> Errand | None:
    """What a server without traffic needs next to serve a version; None: nothing, or nothing yet."""
    if server.busy is not None:
        return None
    said = server.said
    if said is None:
        return look(seen, server)
    if any(failed_lately(seen, server, call, source.version) for call in (*_CHANGES, Call.OPEN)):
        return None
    if has_to_go(server, source.version):
        return None
    if said.version != source.version:
        return Errand(Call.LOAD, source)
    if said.paused:
        return Errand(Call.RESUME)
    if not is_checked(seen, server):
        return Errand(Call.CHECK)
    return look(seen, server) if said.is_open else Errand(Call.OPEN, source)


def failed_lately(seen: Seen, server: Server, call: Call, version: int) -> bool:
    """Whether a call (for this version, where it is for one) failed too short a time ago to be tried again."""
    failure = server.failures.get(call)
    if failure is None or seen.now >= failure.at + TRY_AGAIN:
        return False
    return failure.errand.source is None or failure.errand.source.version == version


def has_to_go(server: Server, version: int) -> bool:
    """Only a restart brings this newcomer to a version.

    It failed at what it was asked, and the cause is its own. Or it lets calls through for another version: it was open
    before the kubelet counted the start that it is of, and has calls that runners have not ended yet, so its weights must
    not change.
    """
    if any(call in server.failures and not server.failures[call].untouched for call in _CHANGES):
        return True
    return server.said is not None and server.said.is_open and server.said.version != version


def is_checked(seen: Seen, server: Server) -> bool:
    """Its engine's checksums are known, or known not to exist, for the weights it has."""
    assert server.said is not None
    entry = seen.entry(server) if seen.status.policy.gate is Gate.OPEN else None
    return server.said.checked or (entry is not None and entry.policy_version == server.said.version)


def digest_of(seen: Seen, server: Server) -> str | None:
    """Digest of the weights of the version it names, when its engine makes any."""
    entry = seen.entry(server)
    if server.said is not None and server.said.checked:
        return server.said.digest
    return entry.weights_digest if entry is not None else None


def odd_ones(seen: Seen, servers: Iterable[Server], old: Collection[str | None] = ()) -> list[Server]:
    """Servers of one version whose weights are not what most of them have: a version is a name, and proves nothing.

    Args:
        old: digests from before a load. Where as many have these as have something else, these are the odd ones.
    """
    digests = {server.key: digest for server in servers if (digest := digest_of(seen, server)) is not None}
    if len(set(digests.values())) < 2:
        return []
    verified = Counter(entry.weights_digest for entry in seen.status.servers if entry.ready)
    counts = Counter(digests.values())
    right = max(counts, key=lambda digest: (counts[digest], digest not in old, 0 if old else verified[digest], digest))
    return [server for server in servers if digests.get(server.key, right) != right]


def is_ready(seen: Seen, server: Server) -> bool:
    """Whether runners may call it while the gate is open: as it says, or as was verified before it could be asked."""
    return is_verified(seen, server) and (server.said is None or server.said.is_open)


def is_verified(seen: Seen, server: Server) -> bool:
    """Whether it runs with the current version, so that its gateway may let calls through; as `is_ready`."""
    if not server.up or server.leaving or seen.is_evicted(server):
        return False
    if server.said is None:
        entry = seen.entry(server)
        return entry is not None and entry.ready
    return server.said.version == seen.status.policy.current and not server.said.paused and is_checked(seen, server)


def entry_at_rest(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """A server's entry while the gate is open."""
    if is_ready(seen, server) and server not in evicted:
        return verified(seen, server, seen.status.policy.current)
    if server not in evicted and seen.is_member(server):
        # Its version stays on record: calls that it holds began with it.
        old = seen.entry(server)
        assert old is not None
        return old.model_copy(update={"ready": False, "state": ServerState.PENDING_WEIGHTS})
    return _closed(seen, server, evicted)


def entry_behind_gate(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    """A server's entry while the gate is shut: what runners saw before stays as it was, unless the server leaves."""
    if server not in evicted and seen.is_member(server):
        old = seen.entry(server)
        assert old is not None
        return old
    return _closed(seen, server, evicted)


def _closed(seen: Seen, server: Server, evicted: Collection[Server]) -> ServerStatus:
    if server in evicted or seen.is_evicted(server):
        state = ServerState.EVICTED
    else:
        state = ServerState.PENDING_WEIGHTS if server.up and server.said is not None else ServerState.STARTING
    return ServerStatus(name=server.name, url=server.url, uid=server.uid, restarts=server.restarts, state=state)


def verified(seen: Seen, server: Server, version: int) -> ServerStatus:
    """The entry of a server that was verified to serve a version."""
    return ServerStatus(
        name=server.name,
        url=server.url,
        uid=server.uid,
        policy_version=version,
        ready=True,
        state=ServerState.READY,
        restarts=server.restarts,
        weights_digest=digest_of(seen, server),
    )

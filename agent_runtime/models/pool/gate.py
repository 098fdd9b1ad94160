"""The runner's half of a policy update: when calls may start, and which version made which token. Pure.

vLLM does not say which policy made a token when a request straddles an update. What is known is the order of things: the
operator shuts the gate, pauses all servers, waits until this runner acknowledges that its streams have fallen silent (or,
after 10 s, names it in `policy.mixed`), and only then loads. So all that came before the acknowledgement is of the old
version, and all that comes after it of the version that is current when the gate opens again.
"""

from dataclasses import dataclass, field

from agent_runtime.models.pool.stall_detector import Silence
from rollout_api.model_server import Gate, PolicyStatus
from rollout_api.records import PolicySpan

SILENCE_SECONDS = 1.0
"""Of all streams, after all servers are paused: a token that a server made before needs milliseconds to get here."""
LEASE_SECONDS = 8.0
"""How long a status that shows no pause is good for: the operator waits 10 s for an acknowledgement before it loads."""


@dataclass(eq=False, slots=True)
class CallSpans:
    """The versions of one call's tokens so far, in order. `began` is the version that was current when it began."""

    began: int
    streamed: bool
    """Tokens come as they are made. Where they come all at once, those of a call that straddles an update are unknown."""
    settled: list[tuple[int, int | None]] = field(default_factory=list)
    """(tokens, version)."""
    pending: int = 0
    """Tokens after those, whose version cannot be told yet."""

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.settled) + self.pending

    def settle(self, version: int | None) -> None:
        if not self.streamed and version != self.began:
            version = None
        if self.settled and self.settled[-1][1] == version:
            self.settled[-1] = (self.settled[-1][0] + self.pending, version)
        elif self.pending:
            self.settled.append((self.pending, version))
        self.pending = 0

    def cut(self, tokens: int) -> None:
        excess = self.tokens - tokens
        dropped = min(excess, self.pending)
        self.pending -= dropped
        excess -= dropped
        while excess > 0:
            last, version = self.settled.pop()
            if last > excess:
                self.settled.append((last - excess, version))
            excess -= last

    def spans(self) -> list[PolicySpan]:
        return [
            PolicySpan(tokens=tokens, version=None if version is None else str(version))
            for tokens, version in self.settled
        ]


class PolicyGate:
    """What one runner knows of its ModelServer's policy. `me` is its key in `policy.mixed`; times are of one clock."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._policy: PolicyStatus | None = None
        self._calls: set[CallSpans] = set()
        self._silence = Silence()
        self.good_until = 0.0
        """Until then no update can have come as far as a load without having been seen here."""
        self.acknowledged: int | None = None
        """Update up to which it is settled which version each token has."""

    @property
    def is_open(self) -> bool:
        return self._policy is not None and self._policy.gate is Gate.OPEN

    @property
    def version(self) -> int:
        """The version that calls begin with; 0 before anything is known."""
        return 0 if self._policy is None else self._policy.current

    def begin(self, *, streamed: bool) -> CallSpans:
        call = CallSpans(self.version, streamed)
        self._calls.add(call)
        return call

    def arrived(self, call: CallSpans, tokens: int, now: float) -> None:
        self._silence.broken()
        call.pending += tokens
        if now <= self.good_until and self._is_before_load():
            call.settle(self.version)

    def end(self, call: CallSpans) -> list[PolicySpan]:
        """The call is over. What is pending will never be known."""
        self._calls.discard(call)
        call.settle(None)
        return call.spans()

    def see(self, policy: PolicyStatus, as_of: float) -> None:
        """A status of the ModelServer, which was true at `as_of` or later."""
        over = policy.update if policy.gate is Gate.OPEN else policy.update - 1
        before, self._policy = self._policy or policy, policy
        if self.acknowledged is None:
            self.acknowledged = over
        # An update that came and went without this runner, or another ModelServer of that name.
        unseen = over > self.acknowledged or policy.update < before.update
        if unseen or (self._me in policy.mixed and policy.update > self.acknowledged):
            self._settle_all(None)
        elif policy.gate is Gate.OPEN or policy.update > self.acknowledged:
            self._settle_all(policy.current)
        if unseen:
            self.acknowledged = over
        if policy.gate is Gate.OPEN or not policy.paused:
            self.good_until = as_of + LEASE_SECONDS

    def acknowledges(self, now: float) -> bool:
        """Whether the update is settled here, at this moment; to be asked several times a second."""
        quiet = self._silence.seconds(now)
        policy = self._policy
        if policy is None or not policy.paused or not self._is_before_load() or policy.gate is Gate.OPEN:
            self._silence.broken()
            return False
        if self._calls and quiet < SILENCE_SECONDS:
            return False
        self._settle_all(None)
        self.acknowledged = policy.update
        return True

    def _is_before_load(self) -> bool:
        """Whether what comes now is of the version that the last seen status calls current."""
        policy = self._policy
        if policy is None or self.acknowledged is None:
            return False
        if policy.gate is Gate.OPEN:
            return True
        return policy.update > self.acknowledged and self._me not in policy.mixed

    def _settle_all(self, version: int | None) -> None:
        for call in self._calls:
            call.settle(version)

"""The runner's half of a policy update: when calls may start, and the policy version of each token. Pure.

Servers older than vLLM 0.32 do not report the policy of each token, so it is derived from the order of events. The operator
closes the gate and pauses all servers. It waits until this runner acknowledges that its streams are silent, or adds it to
`policy.mixed` after 10 s. Only then it loads the new policy. So tokens before the acknowledgement have the old version.
Tokens after it have the version that is current when the gate opens again. If a runner has missed an update, all later
tokens of its running streams are unknown: they may have waited in their sockets. Their versions are those that a newer
server reports, if it does (`token_exact/weight_versions.py`).

Calls to a LoRA adapter have a version each (`fixed`): servers hold several versions of an adapter side by side.

The current version never changes without a new update number, even if no server took calls and the gate stayed open.
"""

from dataclasses import dataclass, field

from agent_runtime.models.pool.server import SilenceTimer
from rollout_api.model_server import Gate, PolicyStatus
from rollout_api.records import PolicySpan

SILENCE_SECONDS = 1.0
"""Silence of all streams after all servers are paused: earlier tokens arrive within milliseconds."""
LEASE_SECONDS = 8.0
"""Validity of a status without a pause: the operator waits 10 s for an acknowledgement before it loads."""


@dataclass(eq=False, slots=True)
class CallSpans:
    """Policy versions of one call's tokens so far, in order. `began` is the version when it began."""

    began: int
    streamed: bool
    """Tokens arrive as they are sampled. If they arrive all at once, their versions are unknown when a call spans an
    update.
    """
    fixed: bool = False
    """Every token has the version with which the call, or its present attempt, began: that of an adapter."""
    is_lost: bool = False
    """An update was missed during this attempt. What it delivers may have waited in its socket since before that."""
    settled: list[tuple[int, int | None]] = field(default_factory=list)
    """(tokens, version)."""
    pending: int = 0
    """Later tokens whose version is not known yet."""

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.settled) + self.pending

    def settle(self, version: int | None) -> None:
        if self.fixed:
            version = self.began
        elif not self.streamed and version != self.began:
            version = None
        if self.settled and self.settled[-1][1] == version:
            self.settled[-1] = (self.settled[-1][0] + self.pending, version)
        elif self.pending:
            self.settled.append((self.pending, version))
        self.pending = 0

    def begin_again(self, version: int) -> None:
        """Begin another attempt, which may have another version if that is fixed."""
        self.is_lost = False
        if self.fixed:
            self.settle(None)
            self.began = version

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
    """A runner's knowledge of its ModelServer's policy. `me` is its key in `policy.mixed`; times are of one clock."""

    def __init__(self, me: str, *, fixed: bool = False) -> None:
        self._me, self._fixed = me, fixed
        self._policy: PolicyStatus | None = None
        self._calls: set[CallSpans] = set()
        self._silence = SilenceTimer()
        self.good_until = 0.0
        """Until this time, no update can have loaded a policy without this runner's knowledge."""
        self.acknowledged: int | None = None
        """Latest update for which the version of every token is settled."""

    @property
    def is_open(self) -> bool:
        return self._policy is not None and self._policy.gate is Gate.OPEN

    @property
    def version(self) -> int:
        """Return the version with which calls begin; 0 before the first status."""
        return 0 if self._policy is None else self._policy.current

    def begin(self, *, streamed: bool) -> CallSpans:
        call = CallSpans(self.version, streamed, self._fixed)
        self._calls.add(call)
        return call

    def arrived(self, call: CallSpans, tokens: int, now: float, *, is_known: bool = True) -> None:
        """Process new tokens. `is_known`: the last status is that of their server too."""
        self._silence.broken()
        call.pending += tokens
        if call.fixed or call.is_lost or not is_known:
            call.settle(None)
        elif now <= self.good_until and self._is_before_load():
            call.settle(self.version)

    def end(self, call: CallSpans) -> list[PolicySpan]:
        """End the call. The versions of its pending tokens stay unknown."""
        self._calls.discard(call)
        call.settle(None)
        return call.spans()

    def see(self, policy: PolicyStatus, as_of: float) -> None:
        """Process a status of the ModelServer, which was valid at `as_of` or later."""
        over = policy.update if policy.gate is Gate.OPEN else policy.update - 1
        before, self._policy = self._policy or policy, policy
        if self.acknowledged is None:
            self.acknowledged = over
        # The runner has missed an update, or the ModelServer was replaced by another one with this name.
        unseen = over > self.acknowledged or policy.update < before.update
        if unseen:
            for call in self._calls:
                call.is_lost = True
        if unseen or (self._me in policy.mixed and policy.update > self.acknowledged):
            self._settle_all(None)
        elif policy.gate is Gate.OPEN or policy.update > self.acknowledged:
            self._settle_all(policy.current)
        if unseen:
            self.acknowledged = over
        if policy.gate is Gate.OPEN or not policy.paused:
            self.good_until = as_of + LEASE_SECONDS

    def acknowledges(self, now: float) -> bool:
        """Whether the update can be acknowledged now; call it several times a second."""
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
        """Whether tokens that arrive now have the current version of the last status."""
        policy = self._policy
        if policy is None or self.acknowledged is None:
            return False
        if policy.gate is Gate.OPEN:
            return True
        return policy.update > self.acknowledged and self._me not in policy.mixed

    def _settle_all(self, version: int | None) -> None:
        for call in self._calls:
            call.settle(version)

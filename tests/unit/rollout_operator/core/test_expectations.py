"""Expectations: no plan uses a cache that lacks the operator's own writes, and none waits forever."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_operator.cache import EXPIRY_SECONDS, Expectations, ObjectName

KEYS = ("x", "y", "z")
OBJECTS: tuple[ObjectName, ...] = (("Pod", "n", "a"), ("Pod", "n", "b"), ("Job", "n", "a"))


class Writes(RuleBasedStateMachine):
    """Writes, watch events in any order and time, compared with the set of writes that were not seen yet."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.expectations: Expectations[str] = Expectations()
        self.unseen: dict[str, dict[ObjectName, int]] = {key: {} for key in KEYS}
        self.expires: dict[str, float] = {}

    @rule(key=st.sampled_from(KEYS), obj=st.sampled_from(OBJECTS), version=st.integers(1, 20))
    def write(self, key: str, obj: ObjectName, version: int) -> None:
        self._expire(key)
        self.expectations.expect(key, obj, version, self.now)
        self.unseen[key][obj] = max(version, self.unseen[key].get(obj, 0))
        self.expires[key] = self.now + EXPIRY_SECONDS

    @rule(obj=st.sampled_from(OBJECTS), version=st.integers(1, 20))
    def see(self, obj: ObjectName, version: int) -> None:
        for key in KEYS:
            self._expire(key)
        freed = set()
        for key, writes in self.unseen.items():
            if writes.get(obj, 99) <= version:
                del writes[obj]
                if not writes:
                    freed.add(key)
        assert set(self.expectations.saw(obj, version)) == freed

    @rule(seconds=st.floats(0, 2 * EXPIRY_SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: str) -> None:
        self.expectations.forget(key)
        self.unseen[key] = {}

    @invariant()
    def holds_exactly_while_something_is_unseen(self) -> None:
        for key in KEYS:
            self._expire(key)
            hold = self.expectations.hold(key, self.now)
            assert (hold > 0) == bool(self.unseen[key])
            assert hold <= EXPIRY_SECONDS + 1e-6  # rounding of large times

    def _expire(self, key: str) -> None:
        if self.unseen[key] and self.now >= self.expires[key]:
            assert self.expectations.hold(key, self.now) == 0
            self.unseen[key] = {}


TestWrites = Writes.TestCase

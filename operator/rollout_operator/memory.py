"""What the operator has learned and no object says: that a namespace refuses Overlay pods, that a node cannot mount."""

from rollout_operator.actions import Fact, Remember

MOST_FACTS = 10_000
"""A bound against leaks only; what is learned grows with namespaces and nodes, and expires."""


class Memory:
    """Facts with an expiry. Nothing is persisted: a wrong or old fact costs one more try."""

    def __init__(self) -> None:
        self._facts: dict[Fact, tuple[str, float]] = {}

    def learn(self, what: Remember, now: float) -> None:
        """Keep a fact for its seconds; the newest message counts. `now` is in seconds of any one clock."""
        self._facts.pop(what.fact, None)
        self._facts[what.fact] = (what.message, now + what.seconds)
        if len(self._facts) > MOST_FACTS:
            self._facts = {fact: kept for fact, kept in self._facts.items() if kept[1] > now}
        while len(self._facts) > MOST_FACTS:
            del self._facts[next(iter(self._facts))]

    def recall(self, fact: Fact, now: float) -> str | None:
        """The message of a fact that still holds."""
        kept = self._facts.get(fact)
        return kept[0] if kept and now < kept[1] else None

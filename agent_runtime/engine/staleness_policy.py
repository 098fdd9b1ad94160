"""When a rollout is too old for the trainer: its first token's policy is too many versions behind the newest."""

from collections.abc import Iterable

from rollout_api.records import PolicySpan, Record, ResponseRecord


class StalePolicy(Exception):
    """The rollout is of no use to the trainer any more; the message says how old it is."""


def numbers(spans: Iterable[PolicySpan]) -> list[int]:
    """The versions of spans in order: unknown ones, and names that a model of one's own may use, left out."""
    return [int(span.version) for span in spans if span.version is not None and span.version.isdecimal()]


def versions_of(records: Iterable[Record]) -> list[int]:
    """The versions that made a rollout's tokens, in order."""
    return [
        version for record in records if isinstance(record, ResponseRecord) for version in numbers(record.policy_spans)
    ]


def stale_message(first: int | None, newest: int | None, max_lag: int | None) -> str | None:
    """Why a rollout is stale, or None. `first` made its first token whose version is known."""
    if first is None or newest is None or max_lag is None or newest - first <= max_lag:
        return None
    return (
        f"its first token is of policy {first} and the newest is {newest}: {newest - first} versions, more than "
        f"model.maxPolicyLag {max_lag} allows"
    )


class NewestPolicy:
    """The newest version that any rollout of this process has seen at work."""

    def __init__(self) -> None:
        self.version: int | None = None

    def see(self, versions: Iterable[int]) -> None:
        """A call was answered by these."""
        self.version = max((*versions, *(() if self.version is None else (self.version,))), default=None)


class PolicyLag:
    """How far one rollout lies behind the newest policy. `most` versions are allowed, any number where it is None."""

    def __init__(self, newest: NewestPolicy | None = None, most: int | None = None) -> None:
        self._newest, self._most = newest or NewestPolicy(), most
        self._first: int | None = None
        """Version of the first token whose version is known."""

    def see(self, spans: Iterable[PolicySpan]) -> None:
        """A call of the rollout was answered by these."""
        versions = numbers(spans)
        self._newest.see(versions)
        if self._first is None and versions:
            self._first = versions[0]

    def refuse_if_stale(self) -> None:
        """Raise StalePolicy where more work on this rollout would be for nothing."""
        if message := stale_message(self._first, self._newest.version, self._most):
            raise StalePolicy(message)

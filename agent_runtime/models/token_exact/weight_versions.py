"""Policy versions of an answer's tokens, as vLLM reports them at its end. Pure.

vLLM, docs/serving/online_serving/token_in_token_out.md, "Weight versions" (0.32 or newer): the last chunk of a choice
has `weight_versions: [{version, start, end}]`, ranges of its output tokens, in order and without gaps.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rollout_api.records import PolicySpan

UNLABELLED = "default"
"""The version that vLLM reports for weights without a version."""


def reported_spans(said: Any, tokens: int) -> list[PolicySpan]:
    """Return the spans of an output with this many tokens; none if the server does not report them, or its weights have
    no version.

    Raises ValueError for ranges that do not match the output.
    """
    if not said:
        return []
    spans, place = [], 0
    for entry in said if isinstance(said, list) else [said]:
        match entry:
            case {"version": str(version), "start": int(start), "end": int(end)} if start == place <= end:
                spans.append(PolicySpan(tokens=end - start, version=version))
                place = end
            case _:
                raise ValueError(f"expected ranges without gaps from token 0, got {str(said)[:200]}")
    if place != tokens:
        raise ValueError(f"expected ranges up to token {tokens}, got {str(said)[:200]}")
    return [] if all(span.version == UNLABELLED for span in spans) else spans


def extended(spans: Sequence[PolicySpan], tokens: int, more: Sequence[PolicySpan] = ()) -> list[PolicySpan]:
    """Extend the spans of the first `tokens` tokens by `more` spans. Tokens without a span have no version."""
    missing = tokens - sum(span.tokens for span in spans)
    if not spans and not more:
        return []
    return [*spans, *([PolicySpan(tokens=missing, version=None)] if missing else []), *more]


def completed(spans: Sequence[PolicySpan], reported: Sequence[PolicySpan]) -> list[PolicySpan]:
    """Return the spans, where tokens without a version have the one that the server reported for them.

    Only numbers are versions: a ModelServer's weights have other names while they are loaded or asleep. `reported` is
    empty, or describes the same tokens.
    """
    if not reported or all(span.version is not None for span in spans):
        return list(spans)
    pairs = zip(_versions(spans), _versions(reported), strict=True)
    found = (known if known is not None or not (said or "").isdecimal() else said for known, said in pairs)
    return [PolicySpan(tokens=sum(1 for _ in same), version=version) for version, same in groupby(found)]


def _versions(spans: Sequence[PolicySpan]) -> Iterator[str | None]:
    return (span.version for span in spans for _ in range(span.tokens))

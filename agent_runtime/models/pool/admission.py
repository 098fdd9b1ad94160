"""How many calls this runner may have at one server: additive increase, multiplicative decrease. Pure.

A server whose cache of keys and values is full preempts requests and computes them again later; a call that waits here
costs it nothing. Every runner decides for itself, as the senders of a network do: no runner knows of the others.
"""

from dataclasses import dataclass

INITIAL_CALLS = 32.0
"""A quarter of vLLM's smallest default `max_num_seqs`: a start that harms no server."""
FEWEST_CALLS = 1.0
"""Whatever the metrics say: a runner that stops altogether would never hear that the others have gone."""
INCREASE_CALLS = 8.0
"""Each sample, a second: from the start to vLLM's default of 256 sequences in half a minute."""
GROW_BELOW, TRIM_ABOVE, HALVE_ABOVE = 0.6, 0.8, 0.9
"""Shares of the cache in use: prime-rl's thresholds (`orchestrator/concurrency.py`; there the last one cancels calls)."""
TRIM, HALVE = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """One reading of a server's own metrics."""

    kv_cache_usage: float
    """vllm:kv_cache_usage_perc, 0 to 1."""
    waiting: float
    """vllm:num_requests_waiting, of all its clients."""


def next_limit(limit: float, in_flight: int, pressure: Pressure) -> float:
    """The limit after one more reading, from the limit before it and this runner's calls at the server.

    It grows only while it is what holds calls back: else a quiet hour would let any number through. It shrinks only once the
    calls are down to it: what runs over an earlier limit is about to end, and must not be counted against the next one.
    """
    if in_flight > limit:
        return limit
    if pressure.kv_cache_usage > HALVE_ABOVE:
        return max(FEWEST_CALLS, in_flight * HALVE)
    if pressure.kv_cache_usage > TRIM_ABOVE or pressure.waiting > in_flight:
        return max(FEWEST_CALLS, in_flight * TRIM)
    if pressure.kv_cache_usage < GROW_BELOW and pressure.waiting == 0 and in_flight >= int(limit):
        return limit + INCREASE_CALLS
    return limit


def refused_limit(limit: float, in_flight: int) -> float:
    """The limit after the server has refused a call as one too many (status 429)."""
    return max(FEWEST_CALLS, min(limit, in_flight) * HALVE)

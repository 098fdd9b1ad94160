"""How many calls this runner may have at one server: additive increase, multiplicative decrease. Pure.

A server with a full key-value cache preempts requests and recomputes them later, whereas calls that wait here cause no
load. Each runner decides independently, like senders in a network.
"""

from dataclasses import dataclass

INITIAL_CALLS = 32.0
"""A quarter of vLLM's smallest default `max_num_seqs`, so that a start overloads no server."""
FEWEST_CALLS = 1.0
"""Minimum, because a runner without calls would not detect that the load has ended."""
INCREASE_CALLS = 8.0
"""Increase for each sample, one a second: from the start to vLLM's default of 256 sequences in half a minute."""
GROW_BELOW, TRIM_ABOVE, HALVE_ABOVE = 0.6, 0.8, 0.9
"""Fractions of the cache in use: prime-rl's thresholds (`orchestrator/concurrency.py`; there the last one cancels
calls).
"""
TRIM, HALVE = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """One reading of a server's own metrics."""

    kv_cache_usage: float
    """vllm:kv_cache_usage_perc, from 0 to 1."""
    waiting: float
    """vllm:num_requests_waiting, for all its clients."""


def next_limit(limit: float, in_flight: int, pressure: Pressure) -> float:
    """Return the limit after one more reading, given the previous limit and this runner's calls at the server.

    It only grows while calls wait for it; otherwise a quiet hour would allow any number of calls. It only shrinks when
    the number of calls is not above it: calls above an earlier limit will end soon.
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
    """Return the limit after the server has refused a call as one too many (status 429)."""
    return max(FEWEST_CALLS, min(limit, in_flight) * HALVE)

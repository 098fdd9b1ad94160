"""How many objects to ask for in one request of a list. Pure.

A parsed object takes over twenty times the memory of its JSON, and a tenant's object may have a megabyte. Small pages of
small objects, however, make a list slow: each takes a request.
"""

from typing import Final

FIRST, MOST = 10, 250
"""Objects of the first page, and of any."""
AIM_BYTES: Final = 2**20
MOST_BYTES: Final = 4 * AIM_BYTES
"""A page with more is not parsed. It is asked for again with fewer objects, unless it has one object alone."""


def next_limit(limit: int, size: int) -> int:
    """Objects to ask for next, if `limit` objects had `size` bytes (or more, when the page was cut off)."""
    return max(1, min(MOST, limit * AIM_BYTES // max(1, size)))

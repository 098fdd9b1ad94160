"""Pages of a list: small ones for large objects, large ones for small objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.api import FIRST_PAGE, LARGEST_PAGE, MOST_PAGE_BYTES, PAGE_BYTES, next_limit

SIZES = st.integers(1, 3_000_000)
"""Bytes of one object. The API server accepts requests of 3 MB at most."""


def requests(sizes: list[int]) -> tuple[int, int]:
    """List objects of those sizes; return the number of requests, and the most bytes that are parsed at once."""
    asked, parsed, at, limit = 0, 0, 0, FIRST_PAGE
    while at < len(sizes):
        asked += 1
        assert 1 <= limit <= LARGEST_PAGE
        size = sum(sizes[at : at + limit])
        if size > MOST_PAGE_BYTES and limit > 1:
            limit = next_limit(limit, MOST_PAGE_BYTES + 1)
            continue
        parsed = max(parsed, size)
        at += limit
        limit = next_limit(limit, size)
    return asked, parsed


@given(st.lists(st.tuples(SIZES, st.integers(1, 300)), max_size=8))
def test_a_list_ends_and_never_parses_more_than_its_bound(groups: list[tuple[int, int]]) -> None:
    sizes = [size for size, count in groups for _ in range(count)]
    asked, parsed = requests(sizes)
    assert parsed <= MOST_PAGE_BYTES
    assert asked <= 2 * len(sizes) + 10


@pytest.mark.parametrize("size", [100, 3_500, 7_500])
def test_ordinary_objects_are_listed_in_large_pages(size: int) -> None:
    asked, _ = requests([size] * 5_000)
    assert asked <= 5_000 / min(LARGEST_PAGE, PAGE_BYTES / size) + 3

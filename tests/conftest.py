"""What holds for all tests."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# No test judges how long something took: machines differ, and are busy.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where some are long, their files come first, then those with the most tests: nobody waits for one alone at the end."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    if long:
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in long, -tests[item.path]))

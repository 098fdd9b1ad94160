"""Settings of pytest for all tests."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.support.full import FULL, examples

# No test judges how long something took: machines differ, and are busy. `make test` tries the same examples in each run, so
# that it fails only for a change; `make test-full` tries new ones.
settings.register_profile(
    "any-machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=examples(100),
    derandomize=not FULL,
)
settings.load_profile("any-machine")

QUARANTINE = "quarantine"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that only `make test-full` runs, allow failures of tests in quarantine, and order the files."""
    if not FULL and (full := [item for item in items if item.get_closest_marker("full")]):
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        if mark := item.get_closest_marker("quarantine"):
            item.add_marker(pytest.mark.xfail(reason=f"{QUARANTINE}: {mark.kwargs['reason']}", strict=False))
    # Where some tests are long, their files run first, then those with the most tests: at the end all processes have work.
    long = {item.path for item in items if item.get_closest_marker("long")}
    if long:
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in long, -tests[item.path]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests in quarantine; pytest prints their failures above."""
    counts = {
        outcome: sum(report.wasxfail.startswith(QUARANTINE) for report in terminalreporter.stats.get(outcome, ()))
        for outcome in ("xpassed", "xfailed")
    }
    if sum(counts.values()):
        terminalreporter.section("tests in quarantine")
        terminalreporter.write_line(f"{counts['xfailed']} failed, which fails nothing, and {counts['xpassed']} passed.")

"""Lists the blocks of pages that were not run, at the end of a test run."""

from collections import defaultdict

import pytest

from tests.support.documentation import NEEDS, PAGES, blocks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where they are, and what they would have needed."""
    places = defaultdict(list)
    for page in PAGES:
        for block in blocks(page):
            if block.needs:
                places[block.needs].append(block.place)
    terminalreporter.section("blocks of the documentation that need more than their page's test has")
    for needs, found in sorted(places.items()):
        terminalreporter.write_line(f"{NEEDS[needs]}: {', '.join(found)}")

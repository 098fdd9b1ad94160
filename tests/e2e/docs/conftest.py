"""At the end of a test run stands what pages show and nobody typed here."""

from collections import defaultdict

import pytest

from tests.support.documentation import NEEDS, PAGES, blocks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where, and what it would have needed."""
    places = defaultdict(list)
    for page in PAGES:
        for block in blocks(page):
            if block.needs:
                places[block.needs].append(block.place)
    terminalreporter.section("blocks of the documentation that need more than their page's test has")
    for needs, found in sorted(places.items()):
        terminalreporter.write_line(f"{NEEDS[needs]}: {', '.join(found)}")

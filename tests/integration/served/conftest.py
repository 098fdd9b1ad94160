from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.served.fleet import Fleet


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        await fleet.close()

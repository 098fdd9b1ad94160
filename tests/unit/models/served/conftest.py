from collections.abc import AsyncIterator

import pytest

from tests.unit.models.served.fake_fleet import FakeFleet


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    fleet = FakeFleet()
    yield fleet
    await fleet.model.close()

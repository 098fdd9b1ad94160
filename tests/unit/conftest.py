import inspect
from collections.abc import AsyncIterator

import pytest

from tests.support.virtual_time import VirtualClock, virtual_time


@pytest.fixture
async def virtual_clock(request: pytest.FixtureRequest) -> AsyncIterator[VirtualClock | None]:
    """Make the time of a test's event loop virtual. Tests that are not coroutines start event loops themselves."""
    if not inspect.iscoroutinefunction(request.function):
        yield None
        return
    with virtual_time() as clock:
        yield clock

"""The resource requests of a sandbox with N workspaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.base import quantity, quantity_value
from rollout_api.cluster import MOST_LAYER_BYTES
from rollout_api.on_cluster.sandbox_pod import EXECUTOR_MEMORY, bytes_of, needs_of
from rollout_api.sandbox import Resources

QUANTITIES = st.builds(lambda n, unit: f"{n}{unit}", st.integers(1, 10**4), st.sampled_from(["", "k", "Mi", "Gi", "M"]))


@given(QUANTITIES, QUANTITIES, st.integers(1, 1024))
def test_limits_of_workspaces_are_below_the_limit_of_their_pod(memory: str, disk: str, places: int) -> None:
    needs = needs_of(Resources(memory=memory, disk=disk), places)
    limits = needs.limits()
    assert needs.memory_bytes is not None
    assert needs.memory_bytes >= quantity_value(memory) * places
    assert bytes_of(limits["memory"], "") - needs.memory_bytes >= EXECUTOR_MEMORY
    # A prepared state lies below each workspace, and stored layers below those.
    most = bytes_of(limits["ephemeral-storage"], "")
    assert most - 2 * quantity_value(disk) * places > MOST_LAYER_BYTES
    assert quantity_value(disk) * places < bytes_of(needs.requests()["ephemeral-storage"], "") < most


def test_a_sandbox_requests_what_its_workspaces_use_but_has_room_for_each_alone() -> None:
    one = Resources(memory="1Gi", memory_request="128Mi")
    assert needs_of(one, 16).memory_bytes == 2 << 30
    assert needs_of(one, 4).memory_bytes == 1 << 30
    assert needs_of(one, 1).limits()["memory"] == "1078Mi"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"memory_request": "1Gi"}, "needs memory"), ({"memory": "1Gi", "memory_request": "2G"}, "more than memory")],
)
def test_a_request_above_the_limit_is_refused(fields: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Resources(**fields)


def test_eight_workspaces_of_half_a_core_ask_for_four_cores() -> None:
    assert needs_of(Resources(cpu="500m"), 8).limits() == {"cpu": "4000m"}
    assert needs_of(Resources(cpu="0.1"), 3).requests()["cpu"] == "300m"


def test_without_bounds_a_pod_is_not_the_first_to_be_evicted_and_has_no_limit() -> None:
    needs = needs_of(Resources(), 1)
    assert needs.limits() == {}
    assert set(needs.requests()) == {"memory"}


@given(st.integers(0, 2**50))
def test_formatted_quantity_gives_the_same_bytes(count: int) -> None:
    assert bytes_of(quantity(count), "") == count


@pytest.mark.parametrize("given_text", ["lots", "", "1Zi", "--1"])
def test_invalid_quantity_is_named_with_its_field(given_text: str) -> None:
    with pytest.raises(ValueError, match=r"limits\.memory: .* expected a quantity such as 512Mi"):
        bytes_of(given_text, "limits.memory")

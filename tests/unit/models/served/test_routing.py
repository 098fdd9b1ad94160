from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_runtime.models.pool.routing import BOUND, bound, choose, preference

names = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=8)
fleets = st.lists(names, min_size=1, max_size=12, unique=True)


@given(st.lists(names, max_size=20), fleets, names)
def test_new_server_takes_only_its_share_of_the_groups(groups: list[str], servers: list[str], newcomer: str) -> None:
    assume(newcomer not in servers)
    for group in groups:
        before, after = preference(group, servers), preference(group, [*servers, newcomer])
        assert [server for server in after if server != newcomer] == before


@given(names, fleets, st.data())
def test_removed_server_moves_only_its_own_groups(group: str, servers: list[str], data: st.DataObject) -> None:
    leaving = data.draw(st.sampled_from(servers))
    rest = [server for server in servers if server != leaving]
    assume(rest)
    first = preference(group, servers)[0]
    if first != leaving:
        assert preference(group, rest)[0] == first
    assert preference(group, rest) == [server for server in preference(group, servers) if server != leaving]


def test_the_share_of_a_newcomer_is_about_one_part_of_the_whole() -> None:
    groups, servers = [f"group-{number}" for number in range(4000)], [f"server-{number}" for number in range(7)]
    moved = sum(preference(group, [*servers, "server-7"])[0] == "server-7" for group in groups)
    assert 4000 / 8 * 0.8 < moved < 4000 / 8 * 1.2


@given(fleets, st.lists(names, min_size=1, max_size=120))
def test_no_server_gets_more_calls_than_the_bound_allows(servers: list[str], groups: list[str]) -> None:
    in_flight = Counter(dict.fromkeys(servers, 0))
    limits = dict.fromkeys(servers, len(groups))
    for group in groups:
        server = choose(group, in_flight, limits)
        assert server is not None
        in_flight[server] += 1
        assert in_flight[server] <= bound(in_flight.total(), len(servers))
        assert in_flight[server] <= BOUND * in_flight.total() / len(servers) + 1


@given(fleets, names, st.data())
def test_call_goes_to_the_first_server_of_its_group_with_a_free_place(
    group_servers: list[str], group: str, data: st.DataObject
) -> None:
    in_flight = {server: data.draw(st.integers(0, 8)) for server in group_servers}
    limits = {server: data.draw(st.integers(1, 8)) for server in group_servers}
    chosen = choose(group, in_flight, limits)
    most = bound(sum(in_flight.values()) + 1, len(in_flight))
    below_limit = [server for server in preference(group, in_flight) if in_flight[server] < limits[server]]
    within = [server for server in below_limit if in_flight[server] < most]
    assert chosen == next(iter(within or below_limit), None)


def test_calls_of_one_group_stay_together_while_their_server_has_room() -> None:
    servers = {f"server-{number}": 20 for number in range(8)}
    first = preference("group-1", servers)[0]
    assert all(choose("group-1", servers | {first: 20 + n}, dict.fromkeys(servers, 99)) == first for n in range(5))


@pytest.mark.parametrize("servers", [{}, {"a": 4}])
def test_a_call_waits_where_no_server_may_take_it(servers: dict[str, int]) -> None:
    assert choose("group", servers, dict.fromkeys(servers, 4)) is None


def test_the_order_is_the_same_in_every_process_and_version() -> None:
    # Runners of one job must agree, also while an upgrade replaces them.
    assert preference("group-0", ["a", "b", "c", "d"]) == preference("group-0", {"d", "c", "b", "a"})
    assert preference("group-0", ["a", "b", "c", "d"]) == ["b", "a", "c", "d"]

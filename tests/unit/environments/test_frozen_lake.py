import json
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.environments.hosted.frozen_lake import ACTIONS, FrozenLake, random_map
from agent_runtime.environments.hosted.game import GameError

# Written by ROLL's own generators (commit 8eb27cc): what a seed has to give here as well.
OF_ROLL: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("roll_maps.json").read_text())


@pytest.mark.parametrize("known", OF_ROLL["frozenLake"], ids=lambda known: f"{known['size']}-{known['seed']}")
def test_a_seed_gives_the_map_that_it_gives_in_roll(known: dict[str, Any]) -> None:
    assert random_map(known["size"], known["p"], known["seed"]) == "".join(known["map"])


@given(st.integers(0, 2**31), st.booleans(), st.lists(st.sampled_from(list(ACTIONS)), max_size=25))
def test_the_ice_carries_a_player_where_it_does_in_gymnasium(seed: int, slippery: bool, actions: list[int]) -> None:
    ours = FrozenLake(is_slippery=slippery)
    ours.reset(seed)
    tiles = random_map(4, 0.8, seed)
    theirs = FrozenLakeEnv(desc=[tiles[row : row + 4] for row in range(0, 16, 4)], is_slippery=slippery)
    theirs.reset(seed=seed)
    for action in actions:
        move = ours.step(ACTIONS[action])
        place, reward, terminated, _, _ = theirs.step(action)
        shown = move.observation.replace("\n", "")
        assert next(index for index, symbol in enumerate(shown) if symbol in "PX√") == place
        assert (move.reward, move.terminated) == (reward, terminated)
        if terminated:
            break


def test_every_member_of_a_group_gets_the_same_map() -> None:
    starts = {FrozenLake(is_slippery=False).reset(7) for _ in range(4)}
    assert len(starts) == 1
    assert FrozenLake().reset(8).observation != FrozenLake().reset(7).observation


@given(st.integers(0, 2**31), st.text(max_size=20))
def test_invalid_action_moves_no_player(seed: int, text: str) -> None:
    lake = FrozenLake()
    before = lake.reset(seed).observation
    for action in (None, text):
        if (action or "").strip().lower() not in ("left", "down", "right", "up"):
            move = lake.step(action)
            assert (move.observation, move.valid, move.terminated, move.reward) == (before, False, False, 0.0)


def test_symbols_and_names_of_actions_can_be_the_users_own() -> None:
    lake = FrozenLake(
        is_slippery=False,
        grid_lookup={"0": "A", "1": ".", "2": "#", "3": "Z", "4": "x", "5": "!"},
        grid_vocab={"A": "you"},
        action_lookup={"0": "West", "1": "South", "2": "East", "3": "North"},
        env_instruction="Go.",
    )
    start = lake.reset(3)
    assert start.instruction == "Go.\nSymbols: A: you\nActions: West, South, East, North"
    assert set(start.observation) <= set("A.#Z\n")
    assert lake.step("east").valid


def test_impossible_lake_is_refused_with_valid_values() -> None:
    with pytest.raises(GameError, match=r"size 1 and p 0.8 .* expected size from 2"):
        FrozenLake(size=1)


def test_custom_map_is_the_same_for_every_seed_and_its_ice_is_not() -> None:
    desc = ["SFFF", "FHFH", "FFFH", "HFFG"]
    walks = set()
    for seed in range(8):
        ours, theirs = FrozenLake(desc=desc), FrozenLakeEnv(desc=desc, is_slippery=True)
        assert ours.reset(seed).observation == "P___\n_O_O\n___O\nO__G"
        theirs.reset(seed=seed)
        places = []
        for action in [2, 2, 1, 2, 0, 3]:
            shown = ours.step(ACTIONS[action]).observation.replace("\n", "")
            place, _, terminated, _, _ = theirs.step(action)
            places.append(next(index for index, symbol in enumerate(shown) if symbol in "PX√"))
            assert places[-1] == place
            if terminated:
                break
        walks.add(tuple(places))
    assert len(walks) > 1


@pytest.mark.parametrize(
    "desc", [[], ["S"], ["SG"], ["SFF", "FGF"], ["SS", "FG"], ["FF", "FG"], ["SX", "FG"], ["SH", "HG"], ["SF", "FF"]]
)
def test_invalid_map_is_refused_before_the_first_rollout(desc: list[str]) -> None:
    with pytest.raises(GameError, match="is not a valid map"):
        FrozenLake(desc=desc)

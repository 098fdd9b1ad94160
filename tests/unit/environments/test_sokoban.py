import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.environments.hosted.game import GameError
from agent_runtime.environments.hosted.sokoban import (
    ACTIONS,
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    MOVES,
    PLAYER,
    TARGET,
    Room,
    Sokoban,
    random_room,
)
from tests.support.full import examples

# Written by ROLL's own generators (commit 8eb27cc): what a seed has to give here as well.
OF_ROLL: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("roll_maps.json").read_text())
SMALL = st.builds(random_room, st.just(6), st.just(6), st.just(1), st.just(30), st.integers(0, 2**32 + 5))


@pytest.mark.parametrize("known", OF_ROLL["sokoban"], ids=lambda known: f"{known['dim']}-{known['seed']}")
def test_a_seed_gives_the_room_that_it_gives_in_roll(known: dict[str, Any]) -> None:
    width, height = known["dim"]
    room = random_room(width, height, known["boxes"], known["depth"], known["seed"])
    assert "".join(map(str, room.fixed)) == "".join(known["fixed"])
    assert "".join(map(str, room.now)) == "".join(known["now"])


@settings(max_examples=examples(20))
@given(SMALL)
def test_every_room_can_be_solved(room: Room) -> None:
    assert solution(room) is not None


@settings(max_examples=examples(20))
@given(st.integers(0, 10_000))
def test_shortest_solution_has_the_reward_of_the_rules(seed: int) -> None:
    moves = solution(random_room(6, 6, 1, 30, seed))
    assert moves
    game = Sokoban(dim_room=(6, 6), num_boxes=1, search_depth=30)
    game.reset(seed)
    taken = [game.step(move) for move in moves]
    # A step costs 0.1, the box on its target gives 1, and solving the room 10.
    assert sum(move.reward for move in taken) == pytest.approx(11 - 0.1 * len(moves))
    assert [move.terminated for move in taken] == [False] * (len(moves) - 1) + [True]
    assert taken[-1].success


def test_answer_without_an_action_uses_a_step() -> None:
    game = Sokoban(dim_room=(6, 6), num_boxes=1)
    before = game.reset(42).observation
    move = game.step(None)
    assert (move.observation, move.reward, move.valid, move.terminated) == (before, -0.1, False, False)


def test_seed_without_a_room_gives_the_same_other_room_in_every_process() -> None:
    # ROLL derives the next seed from Python's hash of a text, which differs from process to process.
    assert "".join(map(str, random_room(5, 5, 2, 10, 0).now)) == "0000002110044200511000000"


def test_options_that_allow_no_room_end_with_a_message_and_not_never() -> None:
    with pytest.raises(GameError, match=r"no room of 6 × 6 with 6 boxes .* take fewer boxes"):
        random_room(6, 6, 6, 4, 1)


def test_impossible_room_is_refused_with_valid_values() -> None:
    with pytest.raises(GameError, match=r"num_boxes 9 .* at most as many boxes as the shorter side"):
        Sokoban(dim_room=(6, 6), num_boxes=9)


def solution(room: Room) -> list[str] | None:
    """Return the shortest solution, by a breadth-first search over player and boxes."""
    boxes = frozenset(place for place, cell in enumerate(room.now) if cell in (BOX, BOX_ON_TARGET))
    targets = {place for place, cell in enumerate(room.fixed) if cell == TARGET}
    waiting: deque[tuple[int, frozenset[int], list[str]]] = deque([(room.now.index(PLAYER), boxes, [])])
    seen = {(room.now.index(PLAYER), boxes)}
    names = list(ACTIONS.values())
    while waiting:
        player, boxes, path = waiting.popleft()
        if boxes == targets:
            return path
        for number, (rows, columns) in enumerate(MOVES):
            offset = rows * room.width + columns
            ahead, moved = player + offset, boxes
            if ahead in boxes:
                if room.fixed[ahead + offset] not in (FLOOR, TARGET) or ahead + offset in boxes:
                    continue
                moved = boxes - {ahead} | {ahead + offset}
            if room.fixed[ahead] in (FLOOR, TARGET) and (ahead, moved) not in seen:
                seen.add((ahead, moved))
                waiting.append((ahead, moved, [*path, names[number]]))
    return None

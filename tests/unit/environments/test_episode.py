import json
import math
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.environments.hosted import episode as hosted
from agent_runtime.environments.hosted.episode import Episode
from agent_runtime.environments.hosted.game import GameError
from agent_runtime.environments.hosted.sandboxed import Kept
from agent_runtime.environments.hosted.worker import answer
from rollout_api.environments import BUILT_IN

ACTIONS = st.lists(st.sampled_from(["Left", "Down", "Right", "Up", "nowhere", None]), max_size=12)


def described(name: str = "FrozenLake", **options: Any) -> dict[str, Any]:
    return {"id": name, "seed": 3, "maxSteps": 20, "formatPenalty": -0.01, "config": {}, **options}


class Counter:
    """A class with Gymnasium's methods that uses only text. `limit`: seeds from this one on have no data."""

    def __init__(self, limit: int = 100) -> None:
        self._limit = limit

    def reset(self, seed: int) -> tuple[str | None, dict[str, Any]]:
        self.total = seed
        return (None if seed >= self._limit else f"at {seed}"), {"instruction": "Add."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "boom":
            raise RuntimeError("it broke")
        self.total += len(action)
        return f"at {self.total}", 0.5, self.total > 8, False, {"success": self.total == 9}


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("counting")
    module.__dict__["Counter"] = Counter
    monkeypatch.setitem(sys.modules, "counting", module)


@pytest.mark.parametrize("wrong", ["False", math.nan, 0.5])
def test_success_that_is_no_boolean_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    monkeypatch.setattr(Counter, "step", lambda *_: ("", 0.0, True, False, {"success": wrong}))
    episode = Episode(described("counting:Counter"))
    episode.start()
    with pytest.raises(GameError, match=f"success {wrong!r}, expected a boolean"):
        episode.steps(["a"])


@given(st.integers(0, 1000), st.booleans(), ACTIONS)
def test_same_seed_and_actions_lead_to_the_same_moves(seed: int, slippery: bool, actions: list[str | None]) -> None:
    description = described(seed=seed, config={"is_slippery": slippery})
    one, other = Episode(description), Episode(description)
    assert one.start() == other.start()
    assert one.steps(actions) == [move for action in actions for move in other.steps([action])]


@given(st.integers(0, 1000), ACTIONS, st.data())
def test_step_in_a_sandbox_gives_the_same_result_after_lost_processes(
    seed: int, actions: list[str | None], data: st.DataObject
) -> None:
    description = described(seed=seed)
    episode = Episode(description)
    episode.start()
    wanted = episode.steps(actions)
    kept = Kept()
    for number in range(len(actions)):
        if data.draw(st.booleans(), label="lost"):
            kept = Kept()
        for _ in range(data.draw(st.integers(1, 2), label="times asked")):
            reply = kept.answer({"start": description, "actions": actions[: number + 1]})
            assert reply["moves"] == wanted[: number + 1][-len(reply["moves"]) :]
            assert reply["moves"]


def test_each_step_without_a_known_action_costs_the_penalty() -> None:
    episode = Episode(described())
    episode.start()
    assert [move["reward"] for move in episode.steps([None, "jump", "Down"])] == [-0.01, -0.01, 0.0]


def test_episode_is_truncated_at_its_last_step_and_ignores_later_actions() -> None:
    episode = Episode(described(maxSteps=2))
    episode.start()
    moves = episode.steps([None, None, "Right"])
    assert [(move["terminated"], move["truncated"]) for move in moves] == [(False, False), (False, True), (True, False)]
    assert moves[2]["reward"] == 0.0


def test_a_registered_gymnasium_id_is_rendered_as_text_with_named_actions() -> None:
    episode = Episode(described("FrozenLake-v1", config={"actions": ["West", "South", "East", "North"]}))
    start = episode.start()
    assert start == {"observation": "SFFF\nFHFH\nFFFH\nHFFG", "instruction": "Actions: West, South, East, North"}
    valid, invalid = episode.steps(["south", "Down"])
    assert (valid["valid"], invalid["valid"], invalid["reward"]) == (True, False, -0.01)
    assert invalid["observation"] == valid["observation"]


def test_gymnasium_numbers_become_text_and_actions_are_read_as_json() -> None:
    discrete = Episode(described("CartPole-v1"))
    assert len(json.loads(discrete.start()["observation"])) == 4
    assert [move["valid"] for move in discrete.steps(["1", "2"])] == [True, False]
    continuous = Episode(described("Pendulum-v1"))
    continuous.start()
    assert [move["valid"] for move in continuous.steps(["[0.5]", "[9]", "0.5", "left", "[" * 9000])] == [True] + [
        False
    ] * 4


def test_a_custom_class_acts_in_text_and_decides_its_own_success() -> None:
    episode = Episode(described("counting:Counter"))
    assert episode.start() == {"observation": "at 3", "instruction": "Add."}
    assert [(move["observation"], move["success"]) for move in episode.steps(["abc", "abc"])] == [
        ("at 6", False),
        ("at 9", True),
    ]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Nope-v3", {}, "'Nope-v3' cannot be created: NameNotFound"),
        ("no_such_module:Game", {}, "cannot be created: ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:dumps", {}, r"'json:dumps' cannot be created: TypeError"),
        ("counting:Counter", {"size": 4}, "got an unexpected keyword argument 'size'"),
        ("FrozenLake", {"siz": 4}, "FrozenLake: config is invalid: .*'siz'"),
        ("FrozenLake-v1", {"actions": ["Left"]}, r"actions has 1 names, its space is Discrete\(4\)"),
    ],
)
def test_environment_that_cannot_be_created_is_reported_with_the_reason(
    name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(GameError, match=message):
        Episode(described(name, config=config))


def test_seed_without_data_is_reported() -> None:
    assert Episode(described("counting:Counter", config={"limit": 3})).start()["observation"] is None


def test_worker_continues_when_an_environment_raises() -> None:
    episodes: dict[int, Episode] = {}
    answer(episodes, 1, {"start": described("counting:Counter"), "actions": []})
    broken = answer(episodes, 1, {"actions": ["boom"]})
    assert broken == {"error": "the environment raised RuntimeError: it broke"}
    assert "moves" in answer(episodes, 2, {"start": described(), "actions": ["Left"]})


def test_environments_that_data_sets_may_name_import_nothing_that_they_name() -> None:
    assert hosted.BUILT_IN == BUILT_IN

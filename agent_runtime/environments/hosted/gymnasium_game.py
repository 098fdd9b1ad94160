"""Any registered Gymnasium environment as text, and any class with Gymnasium's `reset` and `step`."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from agent_runtime.environments.hosted.game import GameError, Move, Start, action_number

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Limit of an observation's characters. An image as numbers would exceed it.
LARGEST_OBSERVATION = 100_000


class GymnasiumGame:
    """Converts to text: observations are rendered if possible (`ansi`), actions are names or JSON.

    A class without an `action_space` gets its actions as text. `reset` may return its rules in `info["instruction"]`,
    and None as its observation if there is no episode for a seed; `step` may set `valid` and `success` (`is_success`)
    in its info.
    """

    def __init__(self, environment: Any, name: str, action_names: Sequence[str] | None = None) -> None:
        self._environment, self._name = environment, name
        space: Any = getattr(environment, "action_space", None)
        self._space = space
        first, count = 0, 0
        if type(space).__name__ == "Discrete":
            first, count = int(space.start), int(space.n)
        if action_names is not None and len(action_names) != count:
            raise GameError(f"environment {name!r}: actions has {len(action_names)} names, its space is {self._space}")
        names = action_names or [str(first + number) for number in range(count)]
        self._seen = ""
        self._actions = {first + number: action for number, action in enumerate(names)}

    def reset(self, seed: int) -> Start | None:
        """Begin, with the possible actions as the instruction."""
        observation, info = self._environment.reset(seed=seed)
        if observation is None:
            return None
        return Start(self._text(observation), str(info.get("instruction", self._instruction())))

    @property
    def any_action(self) -> str:
        """Return an action of the space; an empty text if it accepts any text."""
        if self._space is None:
            return ""
        return next(iter(self._actions.values())) if self._actions else json.dumps(_plain(self._space.sample()))

    def step(self, action: str | None) -> Move:
        """Take an action; one outside the space is not taken."""
        taken = self._taken(action)
        if taken is None:
            return Move(self._seen, 0.0, valid=False)
        result = self._environment.step(taken)
        if not isinstance(result, tuple) or len(result) != 5:
            given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise GameError(
                f"environment {self._name!r}: step returned {given}, expected Gymnasium's five values: observation, "
                "reward, terminated, truncated, info"
            )
        observation, reward, terminated, truncated, info = result
        success = info.get("success", info.get("is_success"))
        if success is not None and success not in (False, True):
            raise GameError(f"environment {self._name!r}: info has the success {success!r}, expected a boolean")
        return Move(
            self._text(observation),
            float(reward),
            bool(terminated),
            bool(truncated),
            valid=bool(info.get("valid", True)),
            success=None if success is None else bool(success),
        )

    def _instruction(self) -> str:
        if self._space is None:
            return ""
        if self._actions:
            return f"Actions: {', '.join(self._actions.values())}"
        return f"An action is JSON, one element of {self._space}"

    def _taken(self, action: str | None) -> Any:
        """Return the action in the environment's type; None if invalid."""
        if action is None or self._space is None:
            return action
        if self._actions:
            return action_number(action, self._actions)
        import numpy as np

        try:
            value: Any = json.loads(action)
        except (ValueError, RecursionError):
            return None
        if getattr(self._space, "dtype", None) is not None:
            try:
                value = np.asarray(value, dtype=self._space.dtype)
            except (ValueError, TypeError, OverflowError):
                return None
        return value if self._space.contains(value) else None

    def _text(self, observation: Any) -> str:
        if getattr(self._environment, "render_mode", None) == "ansi":
            text = _COLOURS.sub("", str(self._environment.render())).strip("\n")
        else:
            text = observation if isinstance(observation, str) else str(_plain(observation))
        if len(text) > LARGEST_OBSERVATION:
            raise GameError(
                f"environment {self._name!r}: an observation has {len(text)} characters, as if it were an image; wrap "
                "it so that it returns text, and name the class as module:Class"
            )
        self._seen = text
        return text


def make_gymnasium_game(name: str, config: dict[str, Any]) -> GymnasiumGame:
    """Create the environment of a Gymnasium id, or an instance of `module:Class`, with the options.

    `actions` in the options names the actions of a Discrete space, in order. Raises GameError.
    """
    options = dict(config)
    names = options.pop("actions", None)
    try:
        if ":" in name and "-" not in name.partition(":")[2]:
            module, _, attribute = name.partition(":")
            environment = getattr(importlib.import_module(module), attribute)(**options)
        else:
            environment = _registered(name, options)
    except GameError:
        raise
    except Exception as error:
        raise GameError(f"environment {name!r} cannot be created: {type(error).__name__}: {error}") from error
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise GameError(
                f"environment {name!r} has no {method}; expected Gymnasium's reset(seed=...) and step(action)"
            )
    return GymnasiumGame(environment, name, names)


def _registered(name: str, options: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise GameError(
            f"environment {name!r} needs gymnasium, which is not installed: pip install 'agent-rollouts[environments]'"
        ) from error
    creator: Any = gymnasium.spec(name).entry_point
    if isinstance(creator, str):
        creator = gymnasium.envs.registration.load_env_creator(creator)
    if "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()):
        options.setdefault("render_mode", "ansi")
    return gymnasium.make(name, disable_env_checker=True, **options)


def _plain(value: Any) -> Any:
    """Convert arrays and their scalars to lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value

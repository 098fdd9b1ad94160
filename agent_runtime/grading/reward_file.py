"""Reward files: the verifier's output in /logs/verifier, in the format of Harbor's tasks."""

import json
import math

FOLDER = "/logs/verifier"
TESTS_FOLDER = "/tests"
"""Folder of such a task's hidden tests."""
JSON_PATH = f"{FOLDER}/reward.json"
TEXT_PATH = f"{FOLDER}/reward.txt"
UNAVAILABLE_PATH = f"{FOLDER}/unavailable.txt"
"""Written by a verifier that cannot give a verdict, because something that it needs is away; the text says what. A file,
because an exit code may be that of the code under test.
"""

REWARD_FILE_BYTES = 64 * 1024
"""Largest reward file: a few named numbers."""

LOWEST, HIGHEST = -1.0, 1.0
"""Range of a reward. A number far outside is a mistake, and would dominate its group."""

ROUNDING = 1e-9
"""A number this near to an end of the range is that end: a sum such as 20 × 1/20 is 1.0000000000000002."""

MOST = 1e100
"""Bound of further numbers, so that their sums over steps and rollouts stay finite."""


class RewardFileError(ValueError):
    """A reward file that cannot be read; the message says why."""


def parse_reward(json_data: bytes | None, text_data: bytes | None) -> tuple[float, dict[str, float]]:
    """Return the reward and all named rewards of `reward.json`, else of `reward.txt`.

    `reward.json` has a number, or an object of numbers, of which `reward` (or the only one) counts. As in Harbor, true is 1
    and false 0. Raises RewardFileError.
    """
    if json_data is not None:
        return _from_json(json_data)
    if text_data is None:
        raise RewardFileError(f"neither {JSON_PATH} nor {TEXT_PATH} was written")
    try:
        value = float(text_data.decode("ascii").strip().replace("_", "?"))
    except ValueError:
        raise RewardFileError(f"{TEXT_PATH} has {text_data[:40]!r}, expected one number") from None
    return _in_range(value, TEXT_PATH), {}


def _from_json(data: bytes) -> tuple[float, dict[str, float]]:
    try:
        value = json.loads(data, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise RewardFileError(f"{JSON_PATH} is not JSON: {error}") from None
    if not isinstance(value, dict):
        return _in_range(_number(value, JSON_PATH), JSON_PATH), {}
    rewards = {name: _number(number, f"{JSON_PATH}: {name}") for name, number in value.items()}
    main = "reward" if "reward" in rewards else next(iter(rewards)) if len(rewards) == 1 else None
    if main is None:
        raise RewardFileError(
            f"{JSON_PATH} has {len(rewards)} numbers, but none is named 'reward'; name the number that counts 'reward'"
        )
    return _in_range(rewards[main], f"{JSON_PATH}: {main}"), rewards


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name is given twice")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float):
        # Nested values are not encoded: Python decodes slightly deeper nesting than it encodes.
        kind = (
            "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)[:40]
        )
        raise RewardFileError(f"{where} is {kind}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MOST:  # also false for NaN
        raise RewardFileError(f"{where} is {number}, expected a number from {-MOST:g} to {MOST:g}")
    return number


def _in_range(value: float, where: str) -> float:
    for end in (LOWEST, HIGHEST):
        if abs(value - end) <= ROUNDING:
            return end
    if not LOWEST <= value <= HIGHEST:  # also false for NaN
        raise RewardFileError(f"{where} is {value}, expected a number from {LOWEST:g} to {HIGHEST:g}")
    return value

"""An environment of one step, with a separate offset of the rewards in each group."""

from typing import Any


class Lamp:
    """Switched on by `Up`: reward 1 plus the offset, else the offset alone."""

    def __init__(self, offset: float = 0.0) -> None:
        self._offset = offset

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "dark", {"instruction": "Switch it on."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_on = action == "Up"
        return "lit" if is_on else "dark", self._offset + is_on, True, False, {"success": is_on}

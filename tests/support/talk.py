"""An environment that returns text in every step of its episode."""

from typing import Any

WORDS = ("go on", "and then?", "why?", "how many?", "ünïcode ✓")


class Talk:
    """Takes any action, and returns its next word."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._steps = seed
        return "hello", {"instruction": "Tell a story."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return f"{WORDS[self._steps % len(WORDS)]} ({self._steps})", 0.0, False, False, {}

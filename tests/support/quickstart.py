"""The promises of examples/quickstart/README.md: the reward of each member of each group."""

REWARDS: dict[str, list[float]] = {
    "fix-median": [1, 0.5, 0, 0],
    "parse-duration": [1, 0.5, 0, 1],
    "roman-numerals": [0, 0, 0, 0],
    "merge-intervals": [0, 0, 1, 0],
    "lru-cache": [1, 1, 1, 0.5],
    "split-csv": [1, 0.5, 0, 0],
}

STUMBLES = ("parse-duration", 3)
"""The member that makes malformed tool calls before it fixes the bug; the others that fix all of it make none."""

"""A person who changed a manifest is told the field, and a run never continues with another manifest unnoticed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.job_record import differences

# Manifests in wire form hold no nulls.
manifests = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(manifests, manifests)
def test_diff_has_lines_exactly_for_different_manifests(old: Any, new: Any) -> None:
    assert bool(differences(old, new, "spec")) == (old != new)


def test_each_line_has_the_path_and_both_values() -> None:
    old = {"agent": {"maxTurns": 30}, "tools": ["bash"], "tasks": [{"name": "a"}], "seed": 1}
    new = {"agent": {"maxTurns": 40}, "tools": ["bash", "editor"], "tasks": [{"name": "b"}]}
    assert differences(old, new, "spec") == [
        "spec.agent.maxTurns: 30 → 40",
        "spec.tools: 1 entry → 2 entries",
        'spec.tasks[0].name: "a" → "b"',
        "spec.seed: 1 → not set",
    ]


def test_a_thousand_differences_stay_readable() -> None:
    lines = differences({str(n): n for n in range(1000)}, {str(n): "x" * 500 for n in range(1000)}, "spec")
    assert len(lines) == 21
    assert lines[-1] == "… and 980 more"
    assert max(map(len, lines)) < 100

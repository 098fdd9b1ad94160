"""Which stored steps of Dockerfiles are forgotten."""

from agent_runtime.recording.build_steps import BuildEntry, StoredStep, unused_steps
from rollout_api.records import Layer


def step(key: str, used: float, size: int, layer: str | None = None) -> StoredStep:
    stored = Layer(digest=(layer or key) * 64, bytes=size)
    return StoredStep(key, BuildEntry(layer=stored, step="RUN x", over="", image="i", seconds=1, created=used), used)


STEPS = [step("a", 10, 5), step("b", 20, 5), step("c", 30, 5, "b"), step("d", 40, 5)]


def forgotten(older: float | None = None, most: int | None = None) -> str:
    return "".join(step.key for step in unused_steps(STEPS, now=50, older_than_seconds=older, most_bytes=most))


def test_steps_are_forgotten_by_age_or_size_the_least_recently_used_first() -> None:
    assert forgotten() == ""
    assert forgotten(older=30) == "a"
    assert forgotten(older=0) == "abcd"
    assert forgotten(most=100) == ""
    assert forgotten(most=10) == "a", "a layer of two steps counts once"
    assert forgotten(most=5) == "abc"
    assert forgotten(older=20, most=5) == "abc"
    assert forgotten(most=0) == "abcd"

"""Memory: learned facts are used until they expire, and their number is limited."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.actions import Remember
from rollout_operator.tenant_limits import MOST_CHARACTERS
from rollout_operator.world import MOST_FACTS, Memory


@given(seconds=st.integers(1, 1000), later=st.integers(0, 2000))
def test_a_fact_expires_after_its_seconds(seconds: int, later: int) -> None:
    memory = Memory()
    memory.learn(Remember(("overlay-refused", "n"), "violates PodSecurity", seconds), now=50)
    expected = "violates PodSecurity" if later < seconds else None
    assert memory.recall(("overlay-refused", "n"), now=50 + later) == expected
    assert memory.recall(("overlay-refused", "other"), now=50 + later) is None


def test_learning_a_fact_again_extends_it() -> None:
    memory = Memory()
    memory.learn(Remember(("f",), "first", 10), now=0)
    memory.learn(Remember(("f",), "second", 10), now=9)
    assert memory.recall(("f",), now=15) == "second"


def test_the_message_of_a_fact_is_shortened() -> None:
    memory = Memory()
    memory.learn(Remember(("f",), "x" * 60_000, 10), now=0)
    assert len(memory.recall(("f",), now=1) or "") == MOST_CHARACTERS


def test_new_facts_replace_the_oldest_at_the_limit() -> None:
    memory = Memory()
    for number in range(MOST_FACTS + 50):
        memory.learn(Remember(("f", str(number)), "m", 1000), now=0)
    assert memory.recall(("f", "0"), now=1) is None
    assert memory.recall(("f", str(MOST_FACTS + 49)), now=1) == "m"
    assert len(memory._facts) <= MOST_FACTS

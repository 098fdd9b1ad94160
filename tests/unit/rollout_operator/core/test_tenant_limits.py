"""What is kept of long texts."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.tenant_limits import shortened


@given(st.text(max_size=200), st.integers(20, 100))
def test_shortened_text_keeps_its_start_and_its_end(text: str, most: int) -> None:
    found = shortened(text, most)
    assert len(found) == min(len(text), most)
    assert found == text or (text.startswith(found[:10]) and text.endswith(found[-4:]))

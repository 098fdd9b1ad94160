"""An answer's text ends where its stop string begins, and a streaming client never sees a part of the stop string."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_exact.answer_text import Stops, TextStream, certain_length, cut_at_stop

texts = st.text(alphabet="ab.", max_size=20)
stop_lists = st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3)


def stops(*strings: str, kept: bool = False) -> Stops:
    return Stops(strings, frozenset(), kept)


@given(texts, texts, stop_lists)
def test_the_text_ends_before_the_first_stop_string_that_the_last_token_brought(
    before: str, token: str, strings: list[str]
) -> None:
    text = before + token
    found = cut_at_stop(text, before, stops(*strings))
    new = [
        (stop, at)
        for stop in strings
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > len(before)
    ]
    if new:
        assert found == (new[0][0], text[: new[0][1]])
    else:
        assert (found is None) == all(stop not in text for stop in strings)


def test_a_stop_string_that_the_server_passed_over_does_not_cut_the_text() -> None:
    assert cut_at_stop("a.b.c.", "a.b.c", stops(".")) == (".", "a.b.c")


def test_tokens_behind_the_stop_string_are_cut_off_too() -> None:
    assert cut_at_stop("one STOP two three", "one STOP two", stops("STOP")) == ("STOP", "one ")


def test_stop_string_is_kept_on_request() -> None:
    assert cut_at_stop("one.two", "one", stops(".", kept=True)) == (".", "one.")


def test_a_stop_string_may_begin_and_end_inside_of_tokens_and_characters() -> None:
    assert cut_at_stop("caf\u00e9s!", "caf\ufffd", stops("\u00e9s")) == ("\u00e9s", "caf")


@given(texts, texts, stop_lists)
def test_certain_text_ends_before_any_stop_string(text: str, more: str, strings: list[str]) -> None:
    whole = text + more
    end = min((at for stop in strings if (at := whole.find(stop)) >= 0), default=len(whole))
    assert certain_length(text, strings) <= end


@given(texts, stop_lists, st.data())
def test_client_gets_only_the_text_before_the_stop_string(text: str, strings: list[str], data: st.DataObject) -> None:
    end = min((at for stop in strings if (at := text.find(stop)) >= 0), default=len(text))
    pieces: list[str] = []
    stream = TextStream(pieces.append, tools=False, stops=strings)
    for length in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
        stream.offer(text[:length])
    stream.finish(text[:end])
    assert "".join(pieces) == text[:end]


def test_sampling_parameters_are_read_as_vllm_writes_them() -> None:
    rendered = {"stop": "x", "stop_token_ids": [7], "include_stop_str_in_output": True}
    assert Stops.of(rendered) == Stops(["x"], frozenset({7}), kept=True)
    assert Stops.of({"stop": ["a", ""], "stop_token_ids": None}) == Stops(["a"], frozenset(), kept=False)

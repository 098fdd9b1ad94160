"""The next prompt keeps the sampled ids, however the tokenizer would spell them, or is the rendering."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_exact.prefix import end_of_turn, find_seam, have_same_text

END, START, NEWLINE = 1000, 1001, 1002
SPECIAL = {END: "<end>", START: "<start>", NEWLINE: "\n"}
# Every pair of letters is also a token, which the tokenizer prefers.
LETTERS = "abc"
PAIRS = {left + right: 10 + number for number, (left, right) in enumerate((x, y) for x in LETTERS for y in LETTERS)}
TOKENS = {letter: number for number, letter in enumerate(LETTERS)} | PAIRS
TEXTS = {token: text for text, token in TOKENS.items()} | SPECIAL

words = st.text(alphabet=LETTERS, max_size=7)


def encode(text: str) -> list[int]:
    return [TOKENS[text[at : at + 2]] for at in range(0, len(text), 2)]


def decode(ids: list[int]) -> str:
    return "".join(TEXTS[token] for token in ids)


def turn(text: str) -> list[int]:
    return [START, *encode(text), END, NEWLINE]


@st.composite
def spellings(draw: st.DrawFn, text: str) -> list[int]:
    """Any way in which a model may sample a text."""
    ids: list[int] = []
    while text:
        length = draw(st.integers(1, min(2, len(text))))
        ids.append(TOKENS[text[:length]])
        text = text[length:]
    return ids


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ids that an engine has seen, and the rendering of the same conversation with something new."""
    stored: list[int] = []
    rendered: list[int] = []
    turns = draw(st.integers(1, 4))
    for number in range(turns):
        asked, answer = draw(words), draw(words)
        stored += [*turn(asked), START, *draw(spellings(answer)), END]
        rendered += [*turn(asked), *turn(answer)]
        if number < turns - 1:
            stored.append(NEWLINE)
    if draw(st.booleans()):
        stored.pop()  # cut off: the model did not come to the end of its turn
    return stored, [*rendered, *turn(draw(words)), START]


def joined(stored: list[int], rendered: list[int]) -> list[int] | None:
    seam = find_seam(stored, rendered, END)
    if seam is None or not have_same_text(decode(stored[seam.start :]), decode(rendered[seam.start : seam.end])):
        return None
    return [*stored, *rendered[seam.end :]]


@given(conversations())
def test_joined_prompt_keeps_the_sampled_ids_and_equals_the_rendering(
    conversation: tuple[list[int], list[int]],
) -> None:
    stored, rendered = conversation
    prompt = joined(stored, rendered)
    assert prompt is not None
    assert prompt[: len(stored)] == stored
    assert decode(prompt) == decode(rendered), "every turn closed once, nothing lost, nothing twice"


@given(conversations(), st.data())
def test_joined_prompt_has_the_text_of_the_rendering(
    conversation: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    stored, rendered = conversation
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] = data.draw(st.sampled_from(sorted(TEXTS)))
    prompt = joined(stored, rendered)
    assert prompt is None or have_same_text(decode(prompt), decode(rendered))


@given(st.lists(st.sampled_from(sorted(TEXTS)), min_size=1), st.lists(st.sampled_from(sorted(TEXTS))))
def test_any_two_sequences_can_be_compared(stored: list[int], rendered: list[int]) -> None:
    seam = find_seam(stored, rendered, END)
    if seam is not None:
        assert 0 <= seam.start <= seam.end <= len(rendered)
        assert seam.start <= len(stored)


def test_white_space_normalised_by_tool_parsers_is_equal() -> None:
    sampled = 'Let me see.\n<tool_call>\n{"name":"ls","arguments":{}}\n</tool_call>'
    assert have_same_text(sampled, 'Let me see.\n\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>')
    assert not have_same_text(sampled, sampled.replace("ls", "rm"))


def test_the_token_that_closes_an_answer_is_the_first_that_all_answers_end_with() -> None:
    assert end_of_turn([*turn("ab"), *turn("a")], [*turn("ab"), *turn("b")]) == END
    assert end_of_turn(encode("ab"), encode("ba")) is None


@given(st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=4), words.filter(bool))
def test_stop_strings_that_ended_answers_stay_in_the_context_and_fork_nothing(
    turns: list[tuple[str, str, bool]], stop: str
) -> None:
    stored, rendered = "", ""
    for asked, said, stopped in turns:
        answer = said.partition(stop)[0]
        if (answer + stop).index(stop) < len(answer):
            stopped = False  # it would have ended before
        stored += f"<start>{asked}<end>\n<start>{answer}{stop if stopped else ''}<end>\n"
        rendered += f"<start>{asked}<end>\n<start>{answer}<end>\n"
    assert have_same_text(stored, rendered, [stop], "<end>")
    open_ended = stored.removesuffix("<end>\n"), rendered.removesuffix("<end>\n")
    assert have_same_text(*open_ended, [stop], "<end>"), "the last answer is closed by what follows"


def test_stop_string_in_the_middle_of_an_answer_stays_text() -> None:
    assert not have_same_text("one stop two<end>", "one two<end>", ["stop"], "<end>")
    assert not have_same_text("one stop", "one", [], "<end>")
    assert not have_same_text("one stop", "one", ["stop"], ""), "nobody knows where answers end"


def test_incomplete_character_at_the_end_of_an_answer_is_no_difference() -> None:
    assert have_same_text("one\ufffd<end>two", "one<end>two", [], "<end>")
    assert have_same_text("one\ufffd\ufffd", "one", [], "<end>")
    assert not have_same_text("one\ufffdtwo<end>", "onetwo<end>", [], "<end>")

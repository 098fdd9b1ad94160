from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.support.vllm_server import logprobs_by, made_by, tokenizer
from tests.support.vllm_server.model import sampled_ids
from tests.support.vllm_server.tokenizer import TextStream

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@given(TEXTS)
def test_encoded_text_decodes_to_itself(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text), special=True) == text


@given(TEXTS, st.integers(0, 2**32 - 1))
def test_sampled_tokens_spell_the_text_of_the_script(text: str, state: int) -> None:
    ids = sampled_ids(text, state)
    assert ids[-1] == tokenizer().eos
    assert tokenizer().decode(ids) == text


def test_encoding_a_sampled_text_again_nearly_always_gives_other_ids() -> None:
    text = "I will look at the files, and then run the tests again."
    canonical = tokenizer().encode(text)
    assert sum(sampled_ids(text, state)[:-1] == canonical for state in range(200)) < 4


def test_most_default_answers_also_differ_from_their_encoding() -> None:
    answers = [made_by(1, tokenizer().encode(f"question {n}"), 200) for n in range(200)]
    again = [tokenizer().encode(tokenizer().decode(answer, special=True)) for answer in answers]
    assert sum(one == other for one, other in zip(answers, again, strict=True)) < 100


@given(TEXTS, st.lists(st.integers(0, 40), max_size=8))
def test_a_stream_never_shows_half_a_character(text: str, cuts: list[int]) -> None:
    ids = tokenizer().encode(text)
    stream = TextStream(tokenizer(), special=True)
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(places)]
    assert "".join([*pieces, stream.feed([], final=True)]) == text


@given(
    st.integers(0, 50), st.lists(st.integers(0, 255), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 9)
)
def test_prompt_with_the_tokens_so_far_continues_unchanged(
    version: int, prompt: list[int], count: int, seed: int
) -> None:
    whole = made_by(version, prompt, count, seed=seed, ignore_eos=True)
    for cut in (0, count // 2, count - 1):
        rest = made_by(version, [*prompt, *whole[:cut]], count - cut, seed=seed, ignore_eos=True)
        assert whole[:cut] + rest == whole


def test_versions_differ_in_tokens_and_logprobs() -> None:
    prompt = tokenizer().encode("Which one are you?")
    answers = [tuple(made_by(version, prompt, 20, ignore_eos=True)) for version in range(50)]
    assert len(set(answers)) == 50
    assert len({tuple(logprobs_by(version, prompt, answers[0])) for version in range(50)}) == 50

"""verl's training data: the policy's own tokens, in the context in which they were sampled."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.integrations.verl.samples import samples_of
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.expert_arrays import ExpertArray


def branch(*turns: tuple[int, int, str | None]) -> Branch:
    """Return a branch with these numbers of context tokens, sampled tokens and version for each turn. Its ids count up."""
    mask = [bit for context, sampled, _ in turns for bit in [0] * context + [1] * sampled]
    versions = [version for context, sampled, made in turns for version in [None] * context + [made] * sampled]
    return Branch(
        token_ids=list(range(len(mask))), mask=mask, logprobs=[-0.5 * bit for bit in mask], policy_versions=versions
    )


TURNS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 5), st.sampled_from(["3", "4", "5", None])), min_size=1, max_size=5
)


@given(TURNS, st.integers(1, 12), st.integers(1, 20))
def test_every_token_stays_in_its_place_and_only_sampled_ones_are_trained(
    turns: list[tuple[int, int, str | None]], prompt_length: int, response_length: int
) -> None:
    whole = branch(*turns)
    for sample in samples_of([(whole, None)], prompt_length, response_length):
        ids = sample.prompt_ids + sample.response_ids
        assert ids == whole.token_ids[: len(ids)]
        assert sample.response_mask == whole.mask[len(sample.prompt_ids) : len(ids)]
        assert 1 in sample.response_mask
        assert 1 not in whole.mask[: len(sample.prompt_ids)]
        assert len(sample.prompt_ids) <= prompt_length
        assert len(sample.response_ids) == len(sample.response_mask) == len(sample.logprobs) <= response_length


def test_versions_are_those_of_the_tokens_that_are_trained() -> None:
    (sample,) = samples_of([(branch((3, 2, "7"), (1, 2, "9"), (1, 2, "11")), None)], 10, 5)

    assert (sample.min_version, sample.max_version) == (7, 9)


def test_long_prompt_continues_in_the_response_and_is_not_cut_off() -> None:
    (sample,) = samples_of([(branch((6, 2, "1")), None)], 4, 10)

    assert sample.prompt_ids == [0, 1, 2, 3]
    assert sample.response_ids == [4, 5, 6, 7]
    assert sample.response_mask == [0, 0, 1, 1]


def test_branch_without_trainable_tokens_gives_no_sample() -> None:
    untrained, beyond_the_limit = branch((4, 0, None)), branch((20, 3, "1"))

    assert samples_of([(untrained, None), (beyond_the_limit, None)], 8, 8) == []


def test_response_ends_after_the_first_token_whose_experts_are_unknown() -> None:
    whole = branch((3, 4, "1"), (1, 2, "1"))
    experts = ExpertArray(bytes(2 * 10), "uint8", (10, 2, 1), [(0, 5), (7, 9)])

    (sample,) = samples_of([(whole, experts)], 8, 8)

    assert (sample.prompt_ids, sample.response_ids) == ([0, 1, 2], [3, 4, 5])
    assert sample.experts is experts
    assert samples_of([(whole, replace(experts, reported=[(1, 9)]))], 8, 8) == []

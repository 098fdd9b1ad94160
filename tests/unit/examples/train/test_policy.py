"""The example's policy is a language model whose log probabilities must be right, or nothing is learned."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.recording.branches import Branch
from examples.train import lake, policy
from examples.train.policy import END, TOKENS
from examples.train.server import render
from examples.train.trainer import Sample, WrongPolicy, check, step

PROMPT = render([{"role": "user", "content": "P___\n_O_O\n___O\nO__G"}])


def some_weights(seed: int = 1) -> policy.Weights:
    return np.random.default_rng(seed).normal(size=(policy.ROWS, policy.VOCABULARY))


@given(st.text() | st.lists(st.sampled_from(["<answer>", "Left", "<|end|>", "√"])).map("".join))
def test_encoded_text_decodes_to_itself(text: str) -> None:
    ids = policy.encode(text)
    assert policy.decode(ids, special=True) == text
    assert not {*ids} & {END, TOKENS["<|user|>"]}, "nobody can write what the template alone may say"


@given(st.integers(0, 2**31 - 1), st.integers(1, 7))
def test_continued_answer_equals_the_uncut_one(seed: int, first: int) -> None:
    weights = policy.fresh_weights()
    ids, logprobs = policy.sample(weights, PROMPT, 8, seed)
    head, head_logprobs = policy.sample(weights, PROMPT, first, seed)
    assert (ids[:first], logprobs[:first]) == (head, head_logprobs)
    if head[-1] != END:
        rest, rest_logprobs = policy.sample(weights, [*PROMPT, *head], 8 - first, seed)
        assert (head + rest, head_logprobs + rest_logprobs) == (ids, logprobs)


def test_tokens_are_sampled_with_their_probabilities() -> None:
    prompt = [*PROMPT, TOKENS["<answer>"]]
    weights = 2 * some_weights()
    drawn = np.zeros(policy.VOCABULARY)
    for seed in range(2000):
        [token], [logprob] = policy.sample(weights, prompt, 1, seed)
        drawn[token] += 1
    [found] = policy.log_probabilities(weights, np.array([policy.row_of(prompt)]), np.array([prompt[-1]]))
    assert logprob == found[token]
    assert np.abs(drawn / 2000 - np.exp(found)).max() < 0.05  # more than four standard deviations


def sampled(weights: policy.Weights, seed: int, version: str = "3") -> Branch:
    ids, logprobs = policy.sample(weights, PROMPT, 8, seed)
    context, count = len(PROMPT), len(ids)
    return Branch(
        token_ids=[*PROMPT, *ids],
        mask=[0] * context + [1] * count,
        logprobs=[0.0] * context + logprobs,
        policy_versions=[None] * context + [version] * count,
    )


def test_update_follows_the_gradient_of_the_objective() -> None:
    weights = some_weights()
    samples = [Sample(sampled(weights, seed), advantage) for seed, advantage in ((1, 1.5), (2, -0.5), (3, 0.25))]

    def objective(at: policy.Weights) -> float:
        total = 0.0
        for sample in samples:
            ids = sample.branch.token_ids
            for place in range(len(PROMPT), len(ids)):
                [found] = policy.log_probabilities(
                    at, np.array([policy.row_of(ids[:place])]), np.array([ids[place - 1]])
                )
                total += sample.advantage * found[ids[place]] / len(samples)
        return total

    gradient = step(weights, samples, 1.0) - weights
    direction = np.random.default_rng(5).normal(size=weights.shape)
    measured = (objective(weights + 1e-5 * direction) - objective(weights - 1e-5 * direction)) / 2e-5
    assert measured == pytest.approx(float((gradient * direction).sum()), rel=1e-5)
    assert {*np.flatnonzero(gradient.any(axis=1))} <= {
        policy.row_of(s.branch.token_ids[:place]) for s in samples for place in range(len(PROMPT), 99)
    }


def test_tokens_of_other_weights_another_version_or_no_version_are_not_trained() -> None:
    weights = some_weights()
    check([sampled(weights, seed) for seed in range(4)], "3", weights)
    with pytest.raises(WrongPolicy, match="other log probabilities"):
        check([sampled(some_weights(2), 1)], "3", weights)
    with pytest.raises(WrongPolicy, match=r"policy \{'2'\} were recorded, expected only those of 3"):
        check([sampled(weights, 1, "2")], "3", weights)
    nameless = sampled(weights, 1).model_copy(update={"policy_versions": [None] * 99})
    with pytest.raises(WrongPolicy, match="None"):
        check([nameless], "3", weights)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    policy.save(some_weights(), tmp_path)
    assert policy.checksum(policy.load(tmp_path)) == policy.checksum(some_weights())
    np.save(tmp_path / "table.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"the shape \(2, 3\)"):
        policy.load(tmp_path)


def test_rewards_of_random_and_best_play_are_ordered() -> None:
    assert lake.best_possible(slippery=False) == 1
    # For a random player it makes no difference that the ice may carry it to either side.
    assert lake.at_random(slippery=True) == pytest.approx(lake.at_random(slippery=False))
    values = [lake.at_random(slippery=True), lake.best_possible(slippery=True), lake.best_possible(slippery=False)]
    assert all(lower < higher for lower, higher in pairwise(values))

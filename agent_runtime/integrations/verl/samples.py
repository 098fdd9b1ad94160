"""From the token sequences of a rollout to what verl trains on: a prompt, a response, and a mask over the response. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.recording.branches import Branch


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. `response_mask` is 1 exactly for the tokens that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    """Of the response; 0 where the mask is 0."""
    min_version: int | None
    """Oldest policy that sampled one of its tokens; None where no token says."""
    max_version: int | None


def samples_of(branches: Sequence[Branch], prompt_length: int, response_length: int) -> list[Sample]:
    """The branches that have something to train on, in order.

    The prompt is what precedes the first sampled token, at most `prompt_length` of it: what is longer begins the response,
    with mask 0, because the policy saw it. A response ends at `response_length`, as verl's own agent loops cut it.
    """
    samples = []
    for branch in branches:
        if branch.logprobs is None or 1 not in branch.mask:
            continue
        start = min(branch.mask.index(1), prompt_length)
        end = start + response_length
        mask = branch.mask[start:end]
        if 1 not in mask:
            continue
        versions = [int(version) for version in branch.policy_versions[start:end] if version and version.isdecimal()]
        samples.append(
            Sample(
                prompt_ids=branch.token_ids[:start],
                response_ids=branch.token_ids[start:end],
                response_mask=mask,
                logprobs=branch.logprobs[start:end],
                min_version=min(versions, default=None),
                max_version=max(versions, default=None),
            )
        )
    return samples

"""The trainer: policy gradient updates from the rollouts of one open job.

submit groups → follow results → read tokens → check them → step → new weights to the server → again

`laptop.py` and `cluster.py` decide where rollouts run, and how a server gets its weights.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent_rollouts.records import Branch, Result
from agent_rollouts.session import FinishedGroup
from agent_rollouts.tasks import Task
from examples.train import lake, policy
from examples.train.policy import Weights

Numbers = NDArray[np.intp]

SAME = 1e-6
"""Largest allowed difference between a recorded log probability and its recomputation. Both have 64 bits, but may come
from different machines.
"""


class Stream(Protocol):
    """An open job: a RolloutSession, whose rollouts run in this process, or a JobStream, whose runners are elsewhere."""

    async def submit(self, task: Task, label: str | None = None) -> int:
        """Submit a group."""

    async def tokens(self, result: Result) -> list[Branch]:
        """Return the training data of a finished rollout."""


class PolicyServer(Protocol):
    """The server of the policy that the rollouts use."""

    async def update(self, version: int, weights: Any) -> None:
        """Make the server use these weights, under that version. Returns when that is verified."""


class WrongPolicy(Exception):
    """Rollouts were made with another policy than expected; the message has the evidence."""


@dataclass(frozen=True)
class Sample:
    """A token sequence, and its rollout's advantage in its group."""

    branch: Branch
    advantage: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Parameters of the training."""

    slippery: bool = False
    tiles: tuple[str, ...] = lake.MAP
    updates: int = 12
    enough: float | None = None
    """The training ends early when this share of episodes reaches the goal."""
    groups: int = 32
    """Groups of each update; the job determines the number of members."""
    learning_rate: float = 16.0
    """Large, because each situation has its own weights and occurs in only a few tokens of a step."""


class Trainer:
    """Trains the policy with the rollouts of one open job. `groups` are the stream's finished groups."""

    def __init__(
        self, stream: Stream, groups: AsyncIterator[FinishedGroup], server: PolicyServer, settings: Settings
    ) -> None:
        self._stream, self._groups, self._server, self._settings = stream, groups, server, settings
        self.weights: Any = policy.fresh_weights()
        self.version = 0
        self._submitted = 0

    async def run(self, on_update: Callable[[int, float], None]) -> list[float]:
        """Return the share of episodes that reached the goal, for each update; `on_update` gets its number and that
        share.

        Raises WrongPolicy, and errors of stream and server.
        """
        await self.publish()
        curve: list[float] = []
        for number in range(self._settings.updates):
            groups = await self._play(f"update-{number}")
            curve.append(success(groups))
            on_update(number, curve[-1])
            if self._settings.enough is not None and curve[-1] >= self._settings.enough:
                break
            samples = [sample for group in groups for sample in await self.samples(group)]
            self.learn(samples)
            self.version += 1
            await self.publish()
        return curve

    async def publish(self) -> None:
        await self._server.update(self.version, self.weights)

    async def samples(self, group: FinishedGroup) -> list[Sample]:
        """Return the training data of a group, without rollouts lost to infrastructure. Raises WrongPolicy."""
        kept = [(result, result.advantage) for result in group.results if result.advantage is not None]
        branches = await asyncio.gather(*(self._stream.tokens(result) for result, _ in kept))
        found = [
            Sample(branch, advantage)
            for (_, advantage), of_rollout in zip(kept, branches, strict=True)
            for branch in of_rollout
        ]
        self.check([sample.branch for sample in found])
        return found

    def check(self, branches: Sequence[Branch]) -> None:
        """Check that the current weights sampled every token to train on. Raises WrongPolicy."""
        check(branches, str(self.version), self.weights)

    def learn(self, samples: Sequence[Sample]) -> None:
        self.weights = step(self.weights, samples, self._settings.learning_rate)

    async def _play(self, label: str) -> list[FinishedGroup]:
        for _ in range(self._settings.groups):
            task = lake.task(self._submitted, slippery=self._settings.slippery, tiles=self._settings.tiles)
            await self._stream.submit(task, label)
            self._submitted += 1
        groups = [await anext(self._groups) for _ in range(self._settings.groups)]
        return sorted(groups, key=lambda group: group.sequence)


def success(groups: Sequence[FinishedGroup]) -> float:
    """Return the share of played episodes that reached the goal."""
    passed = [result.passed for group in groups for result in group.results if result.passed is not None]
    return sum(passed) / max(len(passed), 1)


def check(branches: Sequence[Branch], version: str, weights: Weights) -> None:
    """Check that every token to train on was sampled from these weights, under that version. Raises WrongPolicy."""
    for branch in branches:
        check_branch(branch, version, _log_likelihoods(weights, branch) if trained(branch) else np.array([]), SAME)


def check_branch(branch: Branch, version: str, computed: NDArray[Any], tolerance: float) -> None:
    """Check version and log probabilities of a branch at its trained positions. Raises WrongPolicy."""
    places = trained(branch)
    others = {branch.policy_versions[place] for place in places} - {version}
    if others:
        raise WrongPolicy(f"tokens of policy {others} were recorded, expected only those of {version}")
    if branch.logprobs is None:
        raise WrongPolicy(
            "tokens were recorded without log probabilities, so it cannot be checked which weights made them"
        )
    recorded = np.array([branch.logprobs[place] for place in places])
    if places and not np.allclose(recorded, computed, rtol=0, atol=tolerance):
        raise WrongPolicy(
            f"tokens of policy {version} were recorded with other log probabilities than its weights give: the server "
            "uses other weights than it reports"
        )


def trained(branch: Branch) -> list[int]:
    """Return the positions of the tokens that the policy sampled. The very first token is never sampled."""
    return [place for place in range(1, len(branch.mask)) if branch.mask[place]]


def step(weights: Weights, samples: Sequence[Sample], learning_rate: float) -> Weights:
    """Make one step of policy gradient (REINFORCE): tokens of good rollouts become likelier, those of bad ones less
    likely.

    The gradient of a token's log probability with respect to the logits is the token's unit vector minus the
    probabilities.
    """
    if not samples:
        return weights
    parts = [(*_positions(sample.branch), sample.advantage) for sample in samples]
    rows, last, tokens = (np.concatenate([part[column] for part in parts]) for column in range(3))
    advantages = np.concatenate([np.full(len(part[0]), part[3]) for part in parts])
    gradient = np.zeros_like(weights)
    np.add.at(gradient, (rows, tokens), advantages)
    # Many positions are in the same situation, so they have the same probabilities.
    situations, of_position = np.unique(np.stack([rows, last]), axis=1, return_inverse=True)
    total = np.bincount(of_position.ravel(), weights=advantages)
    probabilities = np.exp(policy.log_probabilities(weights, situations[0], situations[1]))
    np.subtract.at(gradient, situations[0], total[:, None] * probabilities)
    return weights + learning_rate * gradient / len(samples)


def _log_likelihoods(weights: Weights, branch: Branch) -> NDArray[np.float64]:
    rows, last, tokens = _positions(branch)
    found: NDArray[np.float64] = policy.log_probabilities(weights, rows, last)[np.arange(len(tokens)), tokens]
    return found


def _positions(branch: Branch) -> tuple[Numbers, Numbers, Numbers]:
    ids, places = branch.token_ids, trained(branch)
    rows = [policy.row_of(ids[:place]) for place in places]
    last, tokens = [ids[place - 1] for place in places], [ids[place] for place in places]
    return np.array(rows, dtype=np.intp), np.array(last, dtype=np.intp), np.array(tokens, dtype=np.intp)

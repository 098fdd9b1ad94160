"""The example's training as one loop without server, engine or storage. The training with them must give the same
curve.
"""

from collections.abc import Sequence

from agent_runtime.agents.environment import Environment
from agent_runtime.engine.scheduling.shard import rollout_seed, turn_seed
from agent_runtime.environments.act import INVALID, observation_text
from agent_runtime.environments.answers import AnswerForm
from agent_runtime.environments.host import described
from agent_runtime.environments.hosted.episode import Episode
from agent_runtime.recording.branches import Branch
from agent_runtime.statistics import normalized
from examples.train import lake, policy
from examples.train.policy import END
from examples.train.server import render
from examples.train.trainer import Sample, Settings, step
from rollout_api.records import Message
from rollout_api.rewards import NormalizationMethod

MEMBERS, MOST_TOKENS = 8, 8  # as in examples/train/job.yaml


def bare_curve(settings: Settings, seed: int, updates: int) -> list[float]:
    """Return the share of episodes that reach the goal, by update."""
    weights, curve = policy.fresh_weights(), []
    for update in range(updates):
        samples, reached = list[Sample](), 0.0
        for group in range(update * settings.groups, (update + 1) * settings.groups):
            seeds = [rollout_seed(seed, group * MEMBERS + member) for member in range(MEMBERS)]
            played = [_play(weights, group, settings, member_seed) for member_seed in seeds]
            rewards = [reward for _, reward in played]
            reached += sum(rewards)
            advantages = normalized(rewards, NormalizationMethod.MEAN_STD)
            samples += [Sample(branch, value) for (branch, _), value in zip(played, advantages, strict=True)]
        curve.append(reached / (settings.groups * MEMBERS))
        weights = step(weights, samples, settings.learning_rate)
    return curve


def _play(weights: policy.Weights, number: int, settings: Settings, seed: int) -> tuple[Branch, float]:
    """Return an episode's tokens and its reward."""
    task, form = lake.task(number, slippery=settings.slippery), AnswerForm.of()
    assert task.environment is not None
    episode = Episode(described(task.environment))
    start = episode.start()
    seen = observation_text(task.prompt, observation=start["observation"], turn=1, actions_left=lake.STEPS)
    system: Message = {"role": "system", "content": Environment.system_prompt}
    ids = render([system, {"role": "user", "content": f"{start['instruction']}\n{seen}"}])
    mask, reward = [0] * len(ids), 0.0
    for turn in range(lake.STEPS):
        answer, _ = policy.sample(weights, ids, MOST_TOKENS, turn_seed(seed, turn))
        ids, mask = ids + answer, mask + [1] * len(answer)
        [move] = episode.steps([form.action(policy.decode(answer))])
        reward += move["reward"]
        if move["terminated"] or move["truncated"]:
            break
        feedback = "" if move["valid"] else INVALID
        seen = observation_text(
            task.prompt, observation=move["observation"], feedback=feedback, turn=turn + 2, actions_left=0
        )
        context = _closed(answer) + render([{"role": "user", "content": seen}])
        ids, mask = ids + context, mask + [0] * len(context)
    return Branch(token_ids=ids, mask=mask, policy_versions=[None] * len(ids)), reward


def _closed(answer: Sequence[int]) -> list[int]:
    """Return what the template adds to an answer that was cut off."""
    return [] if answer[-1] == END else [END]

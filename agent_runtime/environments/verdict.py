"""The verdict on an episode: pure. It is in the steps that were recorded, so nothing has to be graded."""

import math
from collections.abc import Sequence

from agent_runtime.environments.act import acted
from agent_runtime.statistics import mean
from rollout_api.environments import RunIn, TaskEnvironment
from rollout_api.records import Record, Verdict


def episode_verdict(environment: TaskEnvironment, records: Sequence[Record]) -> Verdict:
    """The sum of the steps' rewards; an episode without a step has 0.

    Passed is what the environment says of success at its last step; where it says nothing, a reward above 0. The further
    rewards are the metrics that ROLL gives: shares of valid and of effective actions, and success. In a sandbox actions may
    run programs, and these can reach the process that keeps the episode: such a verdict is forgeable.
    """
    steps = acted(records)
    reward = math.fsum(step.data["reward"] for step in steps)
    last = steps[-1].data if steps else {}
    passed = bool(last.get("success", reward > 0))
    rewards = {"success": float(passed)}
    if steps:
        valid = mean([step.data["valid"] for step in steps])
        effective = mean([step.data["effective"] for step in steps if "effective" in step.data])
        shares = {"action_is_valid": valid, "action_is_effective": effective}
        rewards |= {name: share for name, share in shares.items() if share is not None}
    forgeable = environment.run_in is RunIn.SANDBOX
    return Verdict(reward=reward, rewards=rewards, passed=passed, forgeable=forgeable, message=f"{len(steps)} steps")


def step_rewards(records: Sequence[Record]) -> list[float]:
    return [float(step.data["reward"]) for step in acted(records)]

"""The built-in plugin PerformanceStop."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from agent_runtime.plugins.base import GroupInfo, RolloutManager
from rollout_api.records import Outcome, Result


class PerformanceStop(RolloutManager):
    """Ends a group when the last `minEpisodes` graded members, in their order, all reach `threshold`.

    At the latest after `maxEpisodes` members. Masked members count for neither; the rest of the group is Cancelled.
    """

    def __init__(
        self,
        threshold: Annotated[float, Field(ge=0, le=1, description="Reward that counts as success.")] = 0.8,
        min_episodes: Annotated[int, Field(ge=1, description="Successes in a row that end the group.")] = 3,
        max_episodes: Annotated[int, Field(ge=1, description="Graded members that end it in any case.")] = 10,
    ) -> None:
        self.threshold, self.min_episodes, self.max_episodes = threshold, min_episodes, max_episodes

    async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
        rewards = [r.reward for r in results if r.outcome is Outcome.COMPLETED and r.reward is not None]
        return stop_reason(rewards, self.threshold, self.min_episodes, self.max_episodes)


def stop_reason(rewards: Sequence[float], threshold: float, least: int, most: int) -> str | None:
    """Why no more than these rewards are needed, or None. Pure."""
    last = rewards[-least:]
    if len(last) == least and all(reward >= threshold for reward in last):
        return f"the last {least} rewards reach {threshold:g}"
    if len(rewards) >= most:
        return f"{most} members are graded, which is maxEpisodes"
    return None

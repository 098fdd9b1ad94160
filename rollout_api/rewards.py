"""Computation of advantages from rewards."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollout_api.base import ApiModel


class GroupBy(StrEnum):
    """`Batch`: rollouts submitted under one label, else the whole job. `Group`: rollouts of one task. `Tag`: rollouts
    of tasks with the same first tag.
    """

    BATCH = "Batch"
    GROUP = "Group"
    TAG = "Tag"


class NormalizationMethod(StrEnum):
    """`Identity`: the reward itself. `Mean`: minus the mean. `MeanStd`: also divided by the sample's standard
    deviation.

    `AsymClip`: `MeanStd`, kept between -1 and 3.
    """

    IDENTITY = "Identity"
    MEAN = "Mean"
    MEAN_STD = "MeanStd"
    ASYM_CLIP = "AsymClip"


class RewardNormalization(ApiModel):
    """Computation of advantages from rewards. Rollouts without a reward are outside the statistics and get no
    advantage.
    """

    group_by: GroupBy = GroupBy.GROUP
    """Which rollouts' rewards are compared."""
    method: NormalizationMethod = NormalizationMethod.MEAN_STD
    """How the reward is normalised."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute value of an advantage."""

"""How rewards become advantages."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollout_api.base import ApiModel


class GroupBy(StrEnum):
    """`Batch`: rewards of rollouts submitted under one label, else of the whole job. `Group`: of one task. `Tag`: of tasks
    with the same first tag."""

    BATCH = "Batch"
    GROUP = "Group"
    TAG = "Tag"


class NormalizationMethod(StrEnum):
    """`Identity`: the reward itself. `Mean`: less the mean. `MeanStd`: that, over the sample's standard deviation.

    `AsymClip`: `MeanStd`, kept between -1 and 3.
    """

    IDENTITY = "Identity"
    MEAN = "Mean"
    MEAN_STD = "MeanStd"
    ASYM_CLIP = "AsymClip"


class RewardNormalization(ApiModel):
    """How rewards become advantages. What has no reward takes no part in the statistics, and gets no advantage."""

    group_by: GroupBy = GroupBy.GROUP
    """Whose rewards are compared."""
    method: NormalizationMethod = NormalizationMethod.MEAN_STD
    """What is made of them."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Most that an advantage may be, above and below 0."""

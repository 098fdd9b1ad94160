"""Trainers of examples/train that use their data wrongly, and therefore must learn nothing."""

from dataclasses import replace

from agent_runtime.engine.session import FinishedGroup
from examples.train.trainer import Sample, Trainer


class DealtToOthers(Trainer):
    """Gives each member the advantage of the previous one."""

    async def samples(self, group: FinishedGroup) -> list[Sample]:
        found = await super().samples(group)
        others = [found[-1], *found[:-1]]
        return [replace(mine, advantage=other.advantage) for mine, other in zip(found, others, strict=True)]


class MaskInverted(Trainer):
    """Trains on the prompts and not on the answers."""

    async def samples(self, group: FinishedGroup) -> list[Sample]:
        return [
            replace(sample, branch=sample.branch.model_copy(update={"mask": [1 - mask for mask in sample.branch.mask]}))
            for sample in await super().samples(group)
        ]

"""Runs with verifiers: loads a folder with `results.jsonl` as verifiers does, and prints what it found."""

import json
import sys
from pathlib import Path

from verifiers.types import RolloutTiming
from verifiers.utils.metric_utils import EnvMetrics, ErrorRateMetric, InputTokensMetric, RewardMetric
from verifiers.utils.save_utils import load_outputs, make_dataset

outputs = load_outputs(Path(sys.argv[1]))
graded = [output for output in outputs if output["reward"] is not None]


def mean(metric, of):
    metric.add_outputs(of)
    return metric.compute()


print(
    json.dumps(
        {
            "rewards": make_dataset({"outputs": outputs})["reward"][:],
            "mean": mean(RewardMetric(), graded),
            "errors": mean(ErrorRateMetric(), outputs),
            "input_tokens": mean(InputTokensMetric(), outputs),
            "metrics": mean(EnvMetrics(), graded),
            "total": [RolloutTiming.model_validate(output["timing"]).total for output in outputs],
        }
    )
)

"""`PYTHON -m tests.support.transformer_lake FOLDER PORT SEED UPDATES ENOUGH TRAINER`: examples/train with vLLM.

Prints the learning curve as JSON on its last line. Run it by `vllm_environment.run_with_vllm`.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from examples.train.transformer import SETTINGS, TransformerTrainer, train
from tests.support.wrong_trainers import DealtToOthers, MaskInverted


class TransformerDealtToOthers(DealtToOthers, TransformerTrainer):
    pass


class TransformerMaskInverted(MaskInverted, TransformerTrainer):
    """Trains on the prompts, which have no recorded log probabilities."""


TRAINERS = {
    "Trainer": TransformerTrainer,
    "DealtToOthers": TransformerDealtToOthers,
    "MaskInverted": TransformerMaskInverted,
}


def main() -> None:
    folder, port, seed, updates, enough, trainer = sys.argv[1:]
    settings = replace(SETTINGS, updates=int(updates), enough=float(enough) or None)
    curve = asyncio.run(train(Path(folder), settings, int(seed), int(port), TRAINERS[trainer]))
    print(json.dumps(curve))


if __name__ == "__main__":
    main()

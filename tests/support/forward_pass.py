"""`PYTHON -m tests.support.forward_pass CHECKPOINT < SEQUENCES > LOGPROBS`: what transformers computes for token ids.

SEQUENCES is a JSON list of lists of ids. LOGPROBS has the log probability of each id after those before it, 0 for the first.
Run it with the Python of `hack/vllm-environment`, which has torch and transformers.
"""

import json
import sys


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    found = []
    for ids in json.load(sys.stdin):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        following = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append([0.0, *following.tolist()])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

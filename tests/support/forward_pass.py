"""`PYTHON -m tests.support.forward_pass CHECKPOINT [router] < SEQUENCES > RESULT`: what transformers computes for ids.

SEQUENCES is a JSON list of lists of ids. RESULT has the log probability of each id after those before it, 0 for the first;
with `router`, what the router of each layer gives to each expert for each id.
Run it with the Python of `hack/vllm-environment`, which has torch and transformers.
"""

import json
import sys


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    found, wants_router = [], "router" in sys.argv[2:]
    for ids in json.load(sys.stdin):
        with torch.inference_mode():
            result = model(torch.tensor([ids]), **({"output_router_logits": True} if wants_router else {}))
        if wants_router:
            found.append(torch.stack(list(result.router_logits), 1).tolist())
            continue
        logits = result.logits[0]
        following = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append([0.0, *following.tolist()])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""verl 0.9.1: an AgentLoopManager that runs rollouts with this engine (docs/trainers-verl.md).

Only `manager`, `worker`, `chat` and `tools` import verl itself.
"""

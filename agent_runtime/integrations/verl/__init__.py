"""verl 0.9.1: an AgentLoopManager whose rollouts are this engine's (docs/trainers-verl.md).

verl itself is imported by `manager`, `worker`, `chat` and `tools` alone.
"""

"""Optional parts behind commands, by entry point: `rolloutctl` itself imports none of them."""

from typing import Final

from agent_runtime.extensions import Registry

HARBOR_DATASET: Final = "harbor-dataset"
"""A function with the options of `rolloutctl dataset` that writes the file and returns its path."""

HARBOR_SERVER: Final = "harbor-server"
"""A coroutine function with the options of `rolloutctl serve` that serves until the process is told to stop."""

integrations = Registry(
    "integration",
    "agent_rollouts.integrations",
    {},
    optional={HARBOR_DATASET: "agent-rollouts[parquet]", HARBOR_SERVER: "agent-rollouts"},
)

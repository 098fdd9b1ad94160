"""Optional integrations that commands use. They are found by entry points, so `rolloutctl` does not import them."""

from typing import Final

from agent_runtime.extensions import Registry

HARBOR_DATASET: Final = "harbor-dataset"
"""A function with the options of `rolloutctl dataset` that writes the file and returns its path."""

HARBOR_SERVER: Final = "harbor-server"
"""A coroutine function with the options of `rolloutctl serve` that serves until the process gets a signal."""

integrations = Registry(
    "integration",
    "agent_rollouts.integrations",
    {},
    optional={HARBOR_DATASET: "agent-rollouts[parquet]", HARBOR_SERVER: "agent-rollouts"},
)

"""Reads the operator's configuration, once at the start."""

from pathlib import Path

import yaml
from pydantic import ValidationError

from rollout_api.base import problems_in
from rollout_api.on_cluster.operator_config import OperatorConfig

CONFIG_VARIABLE = "ROLLOUT_OPERATOR_CONFIG"
"""Environment variable that names the file."""

WRITE_SECONDS = 5
"""Time-out of a write. A lease expires at least this long after its holder stops writing, so that one leader's writes end
before the next leader's begin.
"""


def load_config(path: Path) -> OperatorConfig:
    """Read and validate the file. Raises ValueError with the file, the field and the expected value."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML ({error}); {CONFIG_VARIABLE} must name the file") from None
    try:
        config = OperatorConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(problems_in(error, 'file'))}") from None
    lease = config.lease
    if lease.renew_deadline_seconds + WRITE_SECONDS > lease.duration_seconds:
        raise ValueError(
            f"{path}: lease.renewDeadlineSeconds ({lease.renew_deadline_seconds}) must be at least {WRITE_SECONDS} less "
            f"than lease.durationSeconds ({lease.duration_seconds}), or two replicas could write at once"
        )
    return config

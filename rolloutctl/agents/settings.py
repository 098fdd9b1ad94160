"""agentic-rollout-library's environment variables."""

import logging
import os
from collections.abc import Mapping

from rolloutctl.agents.loop import logger

_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def saves_trajectories(environ: Mapping[str, str] | None = None) -> bool:
    """Return what AGENTIC_SAVE_TRAJECTORIES says; True where it is not set. Raises ValueError."""
    value = (os.environ if environ is None else environ).get("AGENTIC_SAVE_TRAJECTORIES", "true")
    if value.lower() not in _YES_OR_NO:
        raise ValueError(f"AGENTIC_SAVE_TRAJECTORIES is {value!r}; expected true or false")
    return _YES_OR_NO[value.lower()]


def set_log_level(environ: Mapping[str, str] | None = None) -> None:
    """Log at the level of AGENTIC_LOG_LEVEL, to standard error unless the program has set up logging. Raises ValueError."""
    level = (os.environ if environ is None else environ).get("AGENTIC_LOG_LEVEL")
    if not level:
        return
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"AGENTIC_LOG_LEVEL is {level!r}; expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)

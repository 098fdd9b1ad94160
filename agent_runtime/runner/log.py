"""One JSON object per line on stdout, for `kubectl logs` and log collectors."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("rollout.runner")

TERMINATION_LOG = Path("/dev/termination-log")
"""File whose contents `kubectl describe pod` shows after the container's end."""
TERMINATION_BYTES = 4096
"""The kubelet reads at most this."""


class JsonLines(logging.Formatter):
    """Writes time, level and message first; then the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(environ: Mapping[str, str]) -> None:
    """Log to stdout. ROLLOUT_LOG_LEVEL may be `debug`, which adds a line for each sealed rollout."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    log.setLevel(logging.DEBUG if environ.get("ROLLOUT_LOG_LEVEL", "").lower() == "debug" else logging.INFO)


def write_termination_log(message: str, level: int = logging.ERROR) -> None:
    """Log why this process ends, and write it to the termination log, which `kubectl describe pod` shows."""
    log.log(level, message)
    # The kubelet creates it; it exists only in a container.
    if TERMINATION_LOG.exists():
        TERMINATION_LOG.write_bytes(message.encode(errors="replace")[:TERMINATION_BYTES])

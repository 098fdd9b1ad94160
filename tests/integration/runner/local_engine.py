"""The engine of a runner pod as it is, but for its sandboxes: those are processes of this machine, not pods."""

import os
import sys
from pathlib import Path

from agent_runtime.runner.engine import main, run_engine
from rollout_api.sandbox import Provider

folder, port = Path(sys.argv[1]), int(sys.argv[2])
main(run_engine(folder, os.environ, open_provider=lambda start, api, metrics: Provider.LOCAL, metrics_port=port))

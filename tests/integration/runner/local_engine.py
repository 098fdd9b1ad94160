"""The engine of a runner pod, with processes of this machine as sandboxes instead of pods."""

import os
import sys
from pathlib import Path

from agent_runtime.runner.engine import main, run_engine
from rollout_api.sandbox import Provider

folder, port = Path(sys.argv[1]), int(sys.argv[2])
main(run_engine(folder, os.environ, open_provider=lambda start, api, metrics: Provider.LOCAL, metrics_port=port))

"""`python -m agent_runtime.runner`: PID 1 of a runner pod."""

import sys

from agent_runtime.runner.supervisor import supervise

sys.exit(supervise([sys.executable, "-m", "agent_runtime.runner.engine"]))

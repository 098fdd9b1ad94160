"""`python -m agent_runtime.proxy FILE`: the standalone session proxy in a pod, with settings from a YAML file."""

import asyncio
import os
import sys
from pathlib import Path

import yaml
from pydantic import ValidationError

from agent_runtime.models.base import ModelError
from agent_runtime.proxy.serve import ProxySettings, admin_key, log_to_stderr, serve_proxy
from agent_runtime.recording.store import StorageError
from rollout_api.base import problems_in


def main(path: Path) -> None:
    log_to_stderr()
    try:
        settings = ProxySettings.model_validate(yaml.safe_load(path.read_text()))
        key = None if settings.keyless else admin_key(None, os.environ)
        asyncio.run(serve_proxy(settings, key, os.environ))
    except ValidationError as error:
        sys.exit(f"{path}: {problems_in(error, 'file')[0]}")
    except (ModelError, StorageError, OSError, yaml.YAMLError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

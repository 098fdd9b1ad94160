"""`python -m agent_runtime.integrations.verl.train`: verl's own trainer, with the configuration of verl-recipe PR #83.

Before verl starts, Harbor folders are converted to data files, and the settings of the remote agent are determined: the
command line overrides the environment, which overrides the YAML file. Workers get them as environment variables, as in
PR #83.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import hydra  # type: ignore[import-not-found]
from hydra.core.hydra_config import HydraConfig  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf  # type: ignore[import-not-found]
from verl.trainer.main_ppo import main as train  # type: ignore[import-not-found]

from agent_runtime.integrations.harbor_server.dataset import harbor_files
from agent_runtime.integrations.harbor_server.rows import ROOTS_VARIABLE
from agent_runtime.integrations.harbor_server.settings import SERVER_KEY, as_environment, given_at, read_settings
from agent_runtime.proxy.serve import ADMIN_KEY_VARIABLE

_ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"


def prepare(config: DictConfig, environ: Mapping[str, str], overrides: Sequence[str]) -> dict[str, str]:
    """Add data files and the settings to a configuration; return the environment variables for verl's processes.

    Raises SettingsError, and errors of `harbor_files`.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    settings = read_settings(plain, environ, given_at(overrides, plain))
    variables = {} if settings is None else as_environment(settings)
    variables |= {name: environ[name] for name in (SERVER_KEY, ADMIN_KEY_VARIABLE, ROOTS_VARIABLE) if environ.get(name)}
    for key, files in harbor_files(plain).items():
        OmegaConf.update(config, f"data.{key}", files, merge=False)
    for name, value in variables.items():
        OmegaConf.update(config, f"{_ENV_VARS}.{name}", value, force_add=True)
    return variables


@hydra.main(config_path="pkg://agent_runtime.integrations.verl.config", config_name="remote_agent", version_base=None)  # type: ignore[untyped-decorator]
def main(config: DictConfig) -> None:
    os.environ.update(prepare(config, os.environ, HydraConfig.get().overrides.task))
    train(config)


if __name__ == "__main__":
    main()

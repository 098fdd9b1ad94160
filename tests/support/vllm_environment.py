"""The environment of `hack/vllm-environment`, which has vLLM, torch and transformers."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_BOTH = (
    "import runpy, site, sys; site.addsitedir(sys.argv[1]); del sys.argv[:2];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def installed_vllm_python() -> Path:
    """Return its Python, installed if it is not there."""
    done = subprocess.run([REPOSITORY / "hack/vllm-environment"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def run_with_vllm(module: str, *arguments: object) -> str:
    """Run a module of this repository with vLLM's packages, and ours where vLLM has none; return its output."""
    with start_with_vllm(module, *arguments) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, f"{module} ended with {process.returncode}"
    return output


def start_with_vllm(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Start such a module; its output can be read."""
    ours = sysconfig.get_paths()["platlib"]
    command = [installed_vllm_python(), "-c", _BOTH, ours, module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment)


def write_tiny_llama(folder: Path, version: int) -> None:
    """Write a checkpoint and an adapter: see `tests.support.tiny_llama`."""
    _run("tests.support.tiny_llama", str(folder), str(version))


def forward_pass(checkpoint: str, ids: list[list[int]]) -> list[list[float]]:
    """Return the log probability of each token after those before it, by transformers; 0 for the first of a sequence."""
    found: list[list[float]] = json.loads(_run("tests.support.forward_pass", checkpoint, text=json.dumps(ids)))
    return found


def router_logits(checkpoint: str, ids: list[int]) -> list[list[list[float]]]:
    """Return what the router of each layer gives to each expert for each token, by transformers."""
    found: list[Any] = json.loads(_run("tests.support.forward_pass", checkpoint, "router", text=json.dumps([ids])))
    logits: list[list[list[float]]] = found[0]
    return logits


def _run(module: str, *arguments: str, text: str = "") -> str:
    """Run a module that needs only vLLM's environment; return its output."""
    command = [str(installed_vllm_python()), "-m", module, *arguments]
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, check=True)
    return done.stdout

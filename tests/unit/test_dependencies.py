"""The packages declare everything that they import, so that an installation does not depend on other packages'
requirements.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = {"rollout_api": ".", "agent_runtime": ".", "rolloutctl": ".", "rollout_operator": "operator"}
# Imported if present: optional parts of declared packages, or packages of programs that use agent-rollouts.
BROUGHT_BY_OTHERS = {"wandb", "kodo", "torch", "tensordict", "omegaconf", "hydra", "ray", "transformers", "datasets"}
# Our own files that lie beside a program in a sandbox (tasks/repository.py), where it has no package.
BESIDE_PROGRAMS = {"tree_rules"}
# Names of distributions that are not installed beside the tests.
DISTRIBUTIONS = {"transfer_queue": "TransferQueue"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!\[;]", name)[0]).lower()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_every_import_is_declared_together_by_one_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {normal(name) for name in project["dependencies"]}
    extras = {extra: {normal(name) for name in names} for extra, names in project["optional-dependencies"].items()}
    del extras["test"]
    distributions = packages_distributions()
    missing = []
    for package, root in OWN.items():
        for path in (ROOT / root / package).rglob("*.py"):
            found = set(imports(path)) - sys.stdlib_module_names - OWN.keys() - BROUGHT_BY_OTHERS - BESIDE_PROGRAMS
            needed = {normal(distributions.get(name, [DISTRIBUTIONS.get(name, name)])[0]) for name in found} - base
            if needed and not any(needed <= names for names in extras.values()):
                missing.append(f"{path.relative_to(ROOT)}: {sorted(needed)}")
    assert not missing, "declare them in pyproject.toml"

"""`agent_rollouts` is what users import; removing a name breaks their programs."""

import contextlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import agent_rollouts

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).with_name("public_names.txt")
NEEDS_VERL = "agent_rollouts.verl"
NEEDS_PLUGGY = "agent_rollouts.hooks"
OPTIONAL = ["docker", "gymnasium", "kubernetes", "mcp", "numpy", "pluggy", "prometheus_client", "pyarrow", "pyte"]
IMPORT = re.compile(
    r"^\s*(?:from|import) ((?:agent_runtime|rolloutctl|rollout_api|rollout_operator)[\w.]*)", re.MULTILINE
)


def test_public_names_change_only_on_purpose() -> None:
    names = [f"agent_rollouts.{name}" for name in agent_rollouts.__all__]
    for module in pkgutil.iter_modules(agent_rollouts.__path__, "agent_rollouts."):
        if module.name != NEEDS_VERL:
            names += [f"{module.name}.{name}" for name in importlib.import_module(module.name).__all__]
    assert sorted(names) == SURFACE.read_text().split(), f"a change on purpose is written to {SURFACE.name} too"


def test_public_functions_take_no_environment() -> None:
    for qualified in SURFACE.read_text().split():
        module, _, name = qualified.rpartition(".")
        public = getattr(importlib.import_module(module), name)
        methods = (
            [member for key, member in vars(public).items() if not key.startswith("_")]
            if isinstance(public, type)
            else []
        )
        for function in (public, *methods):
            with contextlib.suppress(TypeError, ValueError):  # not a function, or one without a signature
                assert "environ" not in inspect.signature(function).parameters, qualified


def test_documentation_and_examples_import_only_the_public_package() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    others = {f"{page.relative_to(ROOT)}: {name}" for page in pages for name in IMPORT.findall(page.read_text())}
    assert others == set()


def test_a_module_that_defines_a_tool_loads_no_engine() -> None:
    program = "import sys\nfrom agent_rollouts import tool\nprint('agent_runtime.engine' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_package_is_importable_when_no_extra_is_installed() -> None:
    modules = [module.name for module in pkgutil.iter_modules(agent_rollouts.__path__, "agent_rollouts.")]
    needed = [name for name in modules if name not in (NEEDS_VERL, NEEDS_PLUGGY)]
    program = f"import sys\nsys.modules |= dict.fromkeys({OPTIONAL})\nimport rolloutctl.main, {', '.join(needed)}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

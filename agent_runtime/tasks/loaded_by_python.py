"""What Python and pytest load without being asked to: an agent that plants it decides its own verdict."""

import sys

LOADED_BY_THEMSELVES = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        ".coveragerc",
        ".python-version",
        "sitecustomize.py",
        "usercustomize.py",
        "pyvenv.cfg",
    }
)
"""Configuration that pytest, coverage, pyenv and Python look for, and modules that Python imports at its start."""

TEST_FILES = ("test_*.py", "*_test.py")
"""Names of the files that pytest collects from a folder where `python_files` says nothing else."""

METADATA_SUFFIXES = (".dist-info", ".egg-info", ".egg", ".egg-link", "EGG-INFO")
"""Metadata of packages: an `entry_points.txt` anywhere on the path is enough to become a pytest plugin."""

_PYTEST_FAMILY = (
    "pytest _pytest py pluggy iniconfig packaging pygments exceptiongroup tomli colorama attr attrs hypothesis xdist "
    "execnet coverage setuptools pkg_resources _distutils_hack importlib_metadata typing_extensions"
)
# Modules of common packages that register a pytest plugin: pytest imports them before any test, where they are installed.
_PYTEST_PLUGINS = (
    "_hypothesis_pytestplugin _hypothesis_globals _hypothesis_ftz_detector anyio sniffio faker typeguard respx syrupy "
    "pyfakefs requests_mock time_machine inline_snapshot logfire langsmith celery jaxtyping"
)
SHADOWED = frozenset(sys.stdlib_module_names) | frozenset(_PYTEST_FAMILY.split()) | frozenset(_PYTEST_PLUGINS.split())
"""Modules that the test process imports before or beside the code under test."""

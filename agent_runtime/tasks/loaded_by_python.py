"""Files that Python and pytest load automatically: an agent that plants one decides its own verdict."""

import sys

LOADED_AUTOMATICALLY = frozenset(
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
        ".coveragerc.toml",
        ".python-version",
        ".python-versions",
        "sitecustomize.py",
        "usercustomize.py",
        "pyvenv.cfg",
    }
)
"""Configuration files that pytest, coverage, pyenv, uv and Python read automatically, and modules that Python imports
at its start.
"""

TEST_FILES = ("test_*.py", "*_test.py")
"""Names of the files that pytest collects from a folder by default (`python_files`)."""

METADATA_SUFFIXES = (".dist-info", ".egg-info", ".egg", ".egg-link", "EGG-INFO")
"""Metadata of packages: an `entry_points.txt` anywhere on the path can register a pytest plugin."""

# pytest with what any of its versions from 3.6 requires or uses, and what those import (their `requires_dist`).
_PYTEST_FAMILY = (
    "pytest _pytest py pluggy iniconfig packaging pyparsing pygments exceptiongroup tomli toml colorama attr attrs six "
    "more_itertools atomicwrites wcwidth funcsigs pathlib2 scandir zipp importlib_metadata typing_extensions argcomplete "
    "setuptools pkg_resources _distutils_hack numpy yaml"
)
# Modules of common packages that register a pytest plugin, with those that they import. If they are installed, pytest
# imports them before any test.
_PYTEST_PLUGINS = (
    "hypothesis xdist execnet psutil coverage _hypothesis_pytestplugin _hypothesis_globals _hypothesis_ftz_detector "
    "sortedcontainers anyio sniffio idna outcome trio greenlet faker typeguard respx httpx syrupy pyfakefs requests_mock "
    "requests urllib3 certifi chardet charset_normalizer simplejson socks brotli brotlicffi zstandard backports "
    "time_machine inline_snapshot logfire langsmith celery jaxtyping schemathesis termcolor cpuinfo jinja2 markupsafe "
    "werkzeug"
)
# Modules of the standard library in other versions of Python from 3.6, because an image's Python may be older or newer
# than ours.
_OF_OTHER_PYTHONS = (
    "_apple_support _ast_unparse _bootlocale _bootsubprocess _colorize _dummy_thread _dummy_threading _hmac "
    "_interpchannels "
    "_interpqueues _interpreters _ios_support _math_integer _missing_stdlib_info _opcode_metadata _py_warnings "
    "_pydatetime "
    "_pylong _pyrepl _remote_debugging _sha2 _sha256 _sha512 _suggestions _sysconfig _types _wmi _zstd annotationlib "
    "compression distutils dummy_threading imghdr imp org profiling sndhdr uu"
)
SHADOWED = frozenset(sys.stdlib_module_names).union(
    *map(str.split, (_PYTEST_FAMILY, _PYTEST_PLUGINS, _OF_OTHER_PYTHONS))
)
"""Modules that the test process imports before or besides the code under test."""

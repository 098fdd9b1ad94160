"""Prints the requirements in pyproject.toml with the named extras. An image layer that installs them before the code is
copied can be reused when only code changes.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = (requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra])
print(*project["dependencies"], *extras, sep="\n")

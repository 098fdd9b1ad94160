"""Prints the product's requirements in pyproject.toml with these extras, so that an image layer can install
dependencies before the code is copied, and is kept when only code changes.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = (requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra])
print(*project["dependencies"], *extras, sep="\n")

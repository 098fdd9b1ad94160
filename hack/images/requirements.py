"""Prints what pyproject.toml says that the product needs, with these extras: so that dependencies are installed before
there is any code, in a layer that a change of code leaves alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = (requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra])
print(*project["dependencies"], *extras, sep="\n")

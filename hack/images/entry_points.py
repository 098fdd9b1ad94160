"""Writes agent_rollouts.dist-info, where Python finds the entry points of pyproject.toml, because images contain the
packages without installing them.
"""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
folder = Path("agent_rollouts.dist-info")
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\n")
with (folder / "entry_points.txt").open("w") as file:
    for group, entries in project["entry-points"].items():
        print(f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), sep="\n", file=file)

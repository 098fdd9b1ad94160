"""Runs a file of Python. One with `await` outside of functions runs as in `python -m asyncio`.

Usage: run_python.py FILE
"""

import ast
import asyncio
import inspect
import sys
from pathlib import Path

path = Path(sys.argv[1])
code = compile(path.read_text(), str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
sys.path[0] = str(path.parent)
made = eval(code, globals())
if inspect.iscoroutine(made):
    asyncio.run(made)

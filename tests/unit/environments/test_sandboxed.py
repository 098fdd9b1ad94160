import json
import subprocess
import sys
from pathlib import Path

from agent_runtime.environments.hosted.sandboxed import latest
from agent_runtime.environments.sandboxed import program

GAME = """
class Game:
    def reset(self, seed):
        return f"seed {seed}", {}

    def step(self, action):
        return action, 1.0, True, False, {}
"""
ASK = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from agent_runtime.environments.hosted.sandboxed import Kept
start = {"id": "solo:Game", "seed": 4, "maxSteps": 2, "formatPenalty": 0, "config": {}}
print(json.dumps(Kept().answer({"start": start, "actions": ["go"]})))
"""


def test_the_program_for_a_sandbox_needs_nothing_but_python_and_what_the_environment_imports(tmp_path: Path) -> None:
    (tmp_path / "environment.zip").write_bytes(program())
    (tmp_path / "solo.py").write_text(GAME)
    # -I and -S: neither this repository nor any installed package can be found.
    command = [sys.executable, "-I", "-S", "-c", ASK, str(tmp_path / "environment.zip"), str(tmp_path)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["start"]["observation"] == "seed 4"
    assert [move["observation"] for move in answer["moves"]] == ["go"]


def test_an_answer_always_has_its_own_move_and_fits_into_one_output() -> None:
    long = {"observation": "x" * 200_000}
    assert latest([long, long, long]) == [long]
    assert latest([{"observation": "a"}, {"observation": "b"}]) == [{"observation": "a"}, {"observation": "b"}]
    assert latest([{"observation": "x" * 900_000}]) == [{"observation": "x" * 900_000}]

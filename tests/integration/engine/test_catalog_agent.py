"""The home folder of a catalog agent is in the workspace and is not graded. A double replaces the program here."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.program import HOME
from agent_runtime.engine.run import run_job
from agent_runtime.export.formats import Format, export
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import RolloutJob
from tests.support.vllm_server import VllmStandIn

MODES = ("Overlay", "Plain")
PI = r"""#!/bin/sh
[ "$1" = --version ] && { echo 9.9.9; exit; }
cat > prompt.txt
printf '%s\n' "$@" > arguments.txt
cp "$HOME/.pi/agent/models.json" models.json
printf '%s\n' "$HOME" > home.txt
mkdir -p "$HOME/.pi/agent/sessions/a" && cd "$HOME/.pi/agent/sessions/a"
echo '{"type":"session","id":"1","cwd":"/"}' > old.jsonl
touch -d 2020-01-01 old.jsonl
cat > new.jsonl <<'EOF'
{"type":"session","id":"2","cwd":"/"}
{"type":"message","message":{"role":"user","content":"Hi."}}
{"type":"message","message":{"role":"assistant","content":[{"type":"text","text":"Hello."}]}}
EOF
"""
INSTALLED = "../tmp/.rollout/agents/pi-9.9.9/node_modules/.bin"


def manifest(url: str, mode: str) -> dict[str, Any]:
    checks = [
        'test "$(cat prompt.txt)" = "Say {model}."',
        'test "$(tail -n 1 arguments.txt)" = --more',
        """grep -q '"baseUrl": "http://[^/]*/v1"' models.json""",
        f"grep -q '{HOME}$' home.txt",
        f"test ! -e ..{HOME}",
    ]
    task = {
        "name": "talk",
        "prompt": "Say {model}.",
        "files": [{"path": "pi", "content": PI, "mode": "755"}],
        "setup": [f"mkdir -p {INSTALLED} && cp pi {INSTALLED}/pi"],
        "verifier": {"commands": checks},
    }
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "catalog"},
        "spec": {
            "tasks": {"inline": [task]},
            "model": {"endpoint": {"baseURL": f"{url}/v1", "name": "policy"}},
            "agent": {"type": "Pi", "config": {"version": "9.9.9", "arguments": ["--more"]}},
            "sandbox": {"workspaces": {"mode": mode}},
            "groupSize": 1,
            "attempts": {"limit": 1},
            "output": {"uri": "out"},
        },
    }


@pytest.mark.parametrize("mode", MODES)
async def test_home_of_a_catalog_agent_is_kept_out_of_the_grading_and_its_session_is_kept(
    mode: str, tmp_path: Path
) -> None:
    async with VllmStandIn() as server:
        job = RolloutJob.model_validate(manifest(server.url, mode))
        await run_job(job, base_dir=tmp_path, environ={})
    (folder,) = (tmp_path / "out").iterdir()
    run = await open_run(Store.open(str(tmp_path / "out"), {}), folder.name)
    (result,) = run.results()
    assert (result.outcome, result.reward) == ("Completed", 1), (result, run.seals[0].verdict)
    (line,) = [json.loads(line) async for line in export(run, Format.PROGRAM_ATIF)]
    assert [(step["source"], step["message"]) for step in line["steps"]] == [("user", "Hi."), ("agent", "Hello.")]

"""The real verl and Hydra read the configuration of verl-recipe PR #83."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.harbor_server import asking, harbor_server, job
from tests.support.harbor_tasks import hello_world

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).with_name("train_remote.py")
ROOT = Path(__file__).parents[3]


def test_command_line_overrides_environment_and_yaml_and_bad_json_is_reported(tmp_path: Path) -> None:
    task = hello_world(tmp_path / "tasks" / "deep" / "hello")

    made = subprocess.run([ROOT / "hack/verl-environment"], check=True, stdout=subprocess.PIPE, text=True)
    overrides = (
        "remote_agent.agent_name=oracle",
        "remote_agent.agent_kwargs={a: 1}",
        f"data.train_harbor_dir={tmp_path}/tasks",
        f"data.harbor_cache_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}",
    )
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "operator", SCRIPT.parent))),
        "HF_HUB_OFFLINE": "1",
        "REMOTE_AGENT_NAME": "react-agent",
        "REMOTE_AGENT_MAX_RETRIES": "7",
        "REMOTE_AGENT_KWARGS": '{"b": 2}',
        "HARBOR_SERVER_KEY": "k",
    }
    done = subprocess.run(
        [made.stdout.strip(), SCRIPT, tmp_path, *overrides],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | variables,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (told["agent_name"], told["max_retries"], told["harbor_timeout"]) == ("oracle", 7, 1800.0)
    assert (told["agent"], told["attempts"]) == ("Oracle", 7)
    assert told["manager"] == "agent_runtime.integrations.verl.manager.RolloutManager"
    # verl's processes on other machines get the settings that were decided here.
    assert told["variables"]["REMOTE_AGENT_NAME"] == "oracle"
    assert json.loads(told["variables"]["REMOTE_AGENT_KWARGS"]) == {"a": 1}
    assert told["variables"]["HARBOR_SERVER_KEY"] == "k"
    prompt = (task / "instruction.md").read_text()
    assert told["rows"] == [
        {"instance_id": "hello", "local_task_path": str(task), "raw_prompt": [{"role": "user", "content": prompt}]}
    ]
    assert told["bad_json"].startswith("environment variable REMOTE_AGENT_ENVIRONMENT_KWARGS: is '{not json'")


async def test_both_of_verls_trainers_get_the_trials_of_a_harbor_server_token_for_token(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello", **{"instruction.md": "Say the word apple, and write hello.txt.\n"})
    made = subprocess.run([ROOT / "hack/verl-environment"], check=True, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC221
    search = os.pathsep.join(map(str, (ROOT, ROOT / "operator", SCRIPT.parent)))
    async with harbor_server(tmp_path / "server", job("mini", asking(turns=1))) as (url, _):
        with (tmp_path / "log").open("wb") as log:
            playing = await asyncio.create_subprocess_exec(
                made.stdout.strip(), SCRIPT.with_name("play_remote.py"), tmp_path, tmp_path / "tasks", url,
                env=os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log,
            )  # fmt: skip
            assert await playing.wait() == 0, (tmp_path / "log").read_text()[-4000:]

    played: dict[str, Any] = json.loads((tmp_path / "played.json").read_text())
    seen = {(tuple(one["prompt"]), tuple(one["ids"])) for one in played["seen"]}
    for rows in (played["legacy"]["rows"], played["v1"]["rows"]):
        assert len(rows) == 2
        for row in rows:
            assert row["score"] == 1.0
            assert (tuple(row["prompt"]), tuple(row["response"])) in seen
            assert set(row["mask"]) == {1}
    assert played["v1"]["statuses"] == {"hello": "finished"}

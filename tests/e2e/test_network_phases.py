"""Network access by phase: what is listed for the agent is closed for setup and verifier."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROLLOUTCTL = str(Path(sys.executable).parent / "rolloutctl")
# An address of this machine that is not the loopback which a workspace takes for its own, and never sends to a proxy.
HOST = "127.0.0.2"


@pytest.fixture
def site() -> Iterator[int]:
    """A web server of this machine that serves one word."""

    class Word(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer((HOST, 0), Word) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(("listed", "reached"), [(True, ["no", "hello", "no"]), (False, ["no", "no", "no"])])
def test_only_the_phase_that_lists_a_host_reaches_it(
    tmp_path: Path, site: int, listed: bool, reached: list[str]
) -> None:
    fetch = (
        f"import urllib.request as u\ntry:\n    print(u.urlopen('http://{HOST}:{site}/', timeout=5).read().decode())\n"
        "except OSError:\n    print('no')\n"
    )
    calls = [{"name": "bash", "arguments": {"command": "python3 fetch.py > agent.txt"}}]
    manifest = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "network"},
        "spec": {
            "mode": "Eval",
            "tasks": {
                "inline": [
                    {
                        "name": "fetch",
                        "prompt": "Fetch it.",
                        "files": [{"path": "fetch.py", "content": fetch}],
                        "setup": ["python3 fetch.py > setup.txt"],
                        "verifier": {"commands": ["cat setup.txt agent.txt; python3 fetch.py"]},
                    }
                ]
            },
            "model": {
                "scripted": {
                    "tasks": [{"task": "fetch", "members": [{"turns": [{"toolCalls": calls}, {"content": "done"}]}]}]
                }
            },
            "agent": {"tools": ["bash"]},
            "sandbox": {"network": {"agent": [f"{HOST}:{site}"]} if listed else {}, "workspaces": {"mode": "Overlay"}},
            "output": {"uri": "out"},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    run = subprocess.run([ROLLOUTCTL, "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (seal,) = tmp_path.glob("out/*/seals/0.json")
    (command,) = json.loads(seal.read_text())["verdict"]["commands"]
    assert command["output"].split() == reached

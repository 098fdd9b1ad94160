"""Tasks with services in sandbox pods."""

from collections.abc import Callable

import pytest

from tests.support.cluster import Job, Object, small_job

GET = "python3 -c \"import urllib.request as u; print(u.urlopen('http://web:8000/{}').read().decode())\""


@pytest.mark.full
def test_groups_with_services_share_a_pod(new_job: Callable[[Object], Job]) -> None:
    services: list[Object] = [
        {
            "name": "web",
            "command": ["python3", "-m", "http.server", "--directory", "/srv/site", "8000"],
            "volumes": {"site": "/srv/site"},
            "dependsOn": {"seed": "Completed"},
            "health": {"command": GET.format("")},
        },
        {"name": "seed", "command": ["echo seed > /s/seed"], "volumes": {"site": "/s"}},
    ]
    check = f"{GET.format('seed')} | grep -qx seed && {GET.format('own')} | grep -qx own && ! ls /srv/site"
    task: Object = {
        "name": "served",
        "prompt": "Write a page.",
        "volumes": {"site": "/site"},
        "services": services,
        "solution": ["echo own > /site/own"],
        "verifier": {"mode": "Shared", "commands": [check]},
    }
    failing: Object = {
        "name": "failing",
        "prompt": "Do nothing.",
        "services": [{"name": "db", "command": ["echo no disk; exit 4"], "health": {"command": "false"}}],
        "solution": ["true"],
        "verifier": {"commands": ["true"]},
    }
    manifest = small_job("services", agent={"type": "Oracle"}, groupSize=4, attempts={"limit": 1})
    manifest["spec"]["tasks"] = {"inline": [task, failing]}
    manifest["spec"].pop("model", None)
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Overlay", "perSandbox": 4}
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    results = job.results()
    assert [result["reward"] for result in results if result["task"] == "served"] == [1.0] * 4
    lost = [result for result in results if result["task"] == "failing"]
    assert [(result["outcome"], result["reason"]) for result in lost] == [("InfraFailed", "ServiceFailed")] * 4
    assert "service 'db' ended with exit code 4" in lost[0]["message"]

"""Tasks with services in sandbox pods."""

import subprocess
from collections.abc import Callable

import pytest

from tests.support.cluster import REPOSITORY, Job, Object, small_job

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


SERVERS_IMAGE = "localhost/agent-rollouts-base:bookworm"
POSTGRES = "/usr/lib/postgresql/15/bin"
NGINX = "server { listen 8080; root /usr/share/site; }"


@pytest.mark.full  # builds a Debian with three servers
def test_postgres_redis_and_nginx_serve_the_tasks_of_one_pod(new_job: Callable[[Object], Job]) -> None:
    packages = ["postgresql", "redis-server", "nginx-light", "python3-pytest"]
    base = subprocess.run([REPOSITORY / "hack/images/base", *packages], stdout=subprocess.PIPE, text=True, check=True)
    subprocess.run([REPOSITORY / "hack/cluster/load-image", base.stdout.strip()], check=True)
    services: list[Object] = [
        {
            "name": "db",
            "user": "postgres",
            "command": [
                f"export PGDATA=/var/lib/postgresql/own; {POSTGRES}/initdb -A trust && "
                f"exec {POSTGRES}/postgres -c unix_socket_directories=/tmp"
            ],
            "health": {"command": f"{POSTGRES}/pg_isready -h localhost", "seconds": 120},
        },
        {
            "name": "cache",
            "command": ["redis-server", "--save", "", "--dir", "/tmp"],
            "health": {"command": "redis-cli ping | grep -qx PONG", "seconds": 120},
        },
        {
            "name": "web",
            "command": [
                "rm /etc/nginx/sites-enabled/default; mkdir -p /var/log/nginx; "
                f"echo '{NGINX}' > /etc/nginx/conf.d/site.conf; exec nginx -g 'daemon off;'"
            ],
            "volumes": {"site": "/usr/share/site"},
            "dependsOn": {"db": "Healthy", "cache": "Healthy"},
            "health": {"command": "test -s /run/nginx.pid", "seconds": 120},
        },
    ]
    task: Object = {
        "name": "servers",
        "prompt": "Store a row, a key and a page.",
        "volumes": {"site": "/site"},
        "services": services,
        "solution": [
            "psql -h db -U postgres -c 'create table words (word text)' -c \"insert into words values ('agent')\"",
            "redis-cli -h cache set answer 42",
            "echo page > /site/index.html",
        ],
        "verifier": {
            "mode": "Shared",
            "commands": [
                'test "$(psql -h db -U postgres -Atc "select word from words")" = agent',
                'test "$(redis-cli -h cache get answer)" = 42',
                "python3 -c \"import urllib.request as u; assert u.urlopen('http://web:8080').read() == b'page\\n'\"",
            ],
        },
    }
    manifest = small_job("servers", agent={"type": "Oracle"}, groupSize=4, attempts={"limit": 1})
    manifest["spec"]["tasks"] = {"inline": [task]}
    manifest["spec"].pop("model", None)
    manifest["spec"]["sandbox"].update(image=SERVERS_IMAGE, workspaces={"mode": "Overlay", "perSandbox": 4})
    job = new_job(manifest).apply()
    job.wait("Succeeded", seconds=300)
    assert [result["reward"] for result in job.results()] == [1.0] * 4

"""Jobs whose tasks have services, run by rolloutctl: Postgres, Redis and nginx of Debian, kills, and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.integration.engine.test_branching import observed
from tests.integration.oci.conftest import REPOSITORY, Buildah
from tests.integration.oci.test_dockerfile_jobs import ROLLOUTCTL, run
from tests.support.harbor_tasks import write_folder

SERVE = "import http.server as h, os; os.chdir('/srv'); h.test(h.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"
GET = "python3 -c \"import urllib.request as u; print(u.urlopen('http://web:8000/{}').read().decode())\""

COMPOSE = """
services:
  client:
    build: .
    volumes: [site:/site]
    depends_on: {web: {condition: service_started}}
  db:
    build: db
    environment: {PGDATA: /var/lib/postgresql/own}
    healthcheck: {test: [CMD, /usr/lib/postgresql/15/bin/pg_isready, -h, localhost], interval: 1s, retries: 60}
  seed:
    build: db
    entrypoint: psql -h db -U postgres -v ON_ERROR_STOP=1
    command: -f /seed.sql
    volumes: ["./db/seed.sql:/seed.sql"]
    depends_on: {db: {condition: service_healthy}}
  cache:
    build: .
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: redis-server --save "" --port 6379 --dir /tmp
    healthcheck: {test: "redis-cli ping | grep -qx PONG", interval: 1s}
  web:
    build: {context: ., dockerfile: web.Dockerfile, args: {PORT: "8080"}}
    volumes: [site:/usr/share/site]
    depends_on: {seed: {condition: service_completed_successfully}, cache: {condition: service_healthy}}
    healthcheck: {test: "test -s /run/nginx.pid", interval: 1s}
volumes: {site: {}}
"""
SOLUTION = """\
psql -h db -U postgres -c 'insert into words values (2, $$agent$$)'
redis-cli -h cache set answer 42
echo made by the agent > /site/index.html
"""
TESTS = """\
import subprocess, urllib.request

def out(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

def test_database_has_the_seed_and_the_agents_row():
    assert out("psql", "-h", "db", "-U", "postgres", "-Atc", "select word from words order by n") == "seed\\nagent"

def test_cache_has_the_answer():
    assert out("redis-cli", "-h", "cache", "get", "answer") == "42"

def test_web_server_shows_the_page():
    assert urllib.request.urlopen("http://web:8080").read() == b"made by the agent\\n"

def test_agent_sees_neither_files_nor_processes_of_the_services():
    assert subprocess.run(["ls", "/var/lib/postgresql/own", "/seed.sql"], capture_output=True).returncode != 0
    assert not [c for c in out("sh", "-c", "cat /proc/[0-9]*/comm").split() if c.startswith(("postgres", "nginx", "redis"))]
"""
FOLDER: dict[str, str | bytes] = {
    "task.yaml": "instruction: Insert a row, set a key, write a page.\nmax_agent_timeout_sec: 120\n",
    "Dockerfile": "FROM debian:bookworm\nWORKDIR /app\n",
    "docker-compose.yaml": COMPOSE,
    "db/Dockerfile": (
        "FROM debian:bookworm\nENV PATH=/usr/lib/postgresql/15/bin:$PATH\nUSER postgres\n"
        "CMD initdb -D $PGDATA -A trust && exec postgres -D $PGDATA -c unix_socket_directories=/tmp\n"
    ),
    "db/seed.sql": "create table words (n int, word text);\ninsert into words values (1, 'seed');\n",
    "web.Dockerfile": (
        "FROM debian:bookworm AS conf\nARG PORT\n"
        'RUN echo "server { listen $PORT; root /usr/share/site; }" > /site.conf\n'
        "FROM debian:bookworm\nRUN rm /etc/nginx/sites-enabled/default && mkdir /var/log/nginx\n"
        "COPY --from=conf /site.conf /etc/nginx/conf.d/site.conf\n"
        'ENTRYPOINT ["nginx"]\nCMD ["-g", "daemon off;"]\n'
    ),
    "solution.sh": SOLUTION,
    "run-tests.sh": "python3 -m pytest /tests/test_outputs.py -rA\n",
    "tests/test_outputs.py": TESTS,
}


def write_job(folder: Path, tasks: dict[str, Any], name: str = "services", **spec: Any) -> None:
    job = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {"mode": "Eval", "tasks": tasks, "agent": {"type": "Oracle"}, "output": {"uri": "out"}, **spec},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def results(folder: Path) -> list[dict[str, Any]]:
    (run_folder,) = (path for path in (folder / "out").iterdir() if path.name.startswith("services-"))
    return [json.loads(line) for line in (run_folder / "results.jsonl").read_text().splitlines()]


def task(name: str, *services: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A task that is solved if the web server has the agent's file."""
    return {
        "name": name,
        "prompt": "Write a file.",
        "volumes": {"site": "/site"},
        "services": [*services],
        "solution": [f"echo {name} > /site/file"],
        "verifier": {"mode": "Shared", "commands": [f"{GET.format('file')} | grep -qx {name}"]},
        **fields,
    }


def web(**fields: Any) -> dict[str, Any]:
    health = {"command": GET.format(""), "seconds": 60}
    return {"name": "web", "command": ["python3", "-c", SERVE], "volumes": {"site": "/srv"}, "health": health, **fields}


@pytest.mark.full  # builds a Debian with three servers
def test_terminal_bench_folder_with_postgres_redis_and_nginx(buildah: Buildah, tmp_path: Path) -> None:
    packages = ["postgresql", "redis-server", "nginx-light", "python3-pytest"]
    base = subprocess.run([REPOSITORY / "hack/images/base", *packages], stdout=subprocess.PIPE, text=True, check=True)
    write_folder(tmp_path / "tasks/servers", FOLDER)
    source = {
        "from": {"uri": "tasks", "format": "TerminalBench"},
        "dockerfiles": {"bases": {"debian:bookworm": f"docker-archive:{base.stdout.strip()}"}},
    }
    write_job(tmp_path, source, groupSize=4)
    run(tmp_path, "run", "job.yaml")
    assert [result["reward"] for result in results(tmp_path)] == [1.0] * 4


BIN = "/usr/lib/postgresql/15/bin"
DATABASE = {
    "name": "db",
    "user": "postgres",
    "command": [
        f"export PGDATA=/var/lib/postgresql/own; test -s $PGDATA/PG_VERSION || {BIN}/initdb -A trust && "
        f"exec {BIN}/postgres -c unix_socket_directories=/tmp"
    ],
    "health": {"command": f"{BIN}/pg_isready -h localhost", "seconds": 60},
}
CACHE = {
    "name": "cache",
    "command": ["mkdir -p /data && exec redis-server --dir /data --appendonly yes --appendfsync always"],
    "health": {"command": "redis-cli ping | grep -qx PONG", "seconds": 60},
    "volumes": {"site": "/site"},
}
INSERT = """
psql -h db -U postgres -qc "create table numbers (n int)"
(n=0; while n=$((n+1)); do
  psql -h db -U postgres -qc "insert into numbers values ($n)" && redis-cli -h cache set n $n && echo $n > /site/n
done) >/dev/null 2>&1 &
until test "$(cat /site/n)" -gt 20; do sleep 0.1; done
"""
LOOK = """
psql -h db -U postgres -Atc 'select max(n), count(*) from numbers'
redis-cli -h cache get n; cat /site/n
psql -h db -U postgres -Atc 'insert into numbers values (0) returning n'; redis-cli -h cache set n 0
"""


@pytest.mark.full  # builds a Debian with two servers
def test_branch_has_what_clients_were_told_that_postgres_and_redis_stored(buildah: Buildah, tmp_path: Path) -> None:
    packages = ["postgresql", "redis-server", "nginx-light", "python3-pytest"]
    base = subprocess.run([REPOSITORY / "hack/images/base", *packages], stdout=subprocess.PIPE, text=True, check=True)
    written = task("written", DATABASE, CACHE, solution=[], verifier={"mode": "Shared", "commands": ["true"]})
    written["dockerfile"] = {"text": "FROM debian:bookworm\n"}
    dockerfiles = {"bases": {"debian:bookworm": f"docker-archive:{base.stdout.strip()}"}}
    source = {"inline": [written], "dockerfiles": dockerfiles}
    branch = {"branch": [{"job": "out/services", "index": 0, "turn": 0, "count": 2}], "dockerfiles": dockerfiles}
    for name, tasks, last in (("services", source, "true"), ("again", branch, LOOK)):
        turns = [{"toolCalls": [{"name": "bash", "arguments": {"command": command}}]} for command in (INSERT, last)]
        turns.append({"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]})
        entry = {"task": "written@0.0" if name == "again" else "written", "members": [{"turns": turns}]}
        model, agent = {"scripted": {"tasks": [entry]}}, {"tools": ["bash", "finish"]}
        sandbox = {"snapshotEveryTurns": 1} if name == "services" else {}
        write_job(tmp_path, tasks, name, model=model, agent=agent, sandbox=sandbox)
        run(tmp_path, "run", "job.yaml")
    reader = asyncio.run(open_run(Store.open(str(tmp_path / "out"), {}), "again"))
    for index in range(2):
        rows, key, page, returned, *_, answer, _ = asyncio.run(observed(reader, index))[-2].splitlines()
        highest, count = map(int, rows.split("|"))
        assert highest == count >= int(key) >= int(page) >= highest - 1 >= 20
        assert (returned, answer) == ("0", "OK"), "both accept writes"


def test_failing_services_mask_their_own_task_and_no_other(tmp_path: Path) -> None:
    dead = {"name": "dead", "command": ["echo cannot start; exit 3"], "health": {"command": "false"}}
    sick = {"name": "sick", "command": ["sleep", "600"], "health": {"command": "echo no; false", "seconds": 1}}
    large = web(name="large", command=["python3", "-c", "x = bytearray(900 << 20); input()"], health=None)
    large["health"] = {"command": "sleep 2; false", "seconds": 20}
    tasks = [
        task("good", web()),
        task(
            "names",
            web(),
            setup=["echo 127.0.0.1 own >> /etc/hosts"],
            verifier={"mode": "Shared", "commands": ["getent hosts own && getent hosts web"]},
        ),
        task("no-user", web(), {"name": "odd", "command": ["true"], "user": "nobody-here"}),
        task("ends", web(), dead),
        task("never-ready", sick, web(dependsOn={"sick": "Healthy"})),
        task("too-large", web(), large, sandbox={"resources": {"memory": "300Mi"}}),
    ]
    write_job(tmp_path, {"inline": tasks}, attempts={"limit": 1})
    told = run(tmp_path, "run", "job.yaml", code=1)
    found = {result["task"]: result for result in results(tmp_path)}
    assert (found["good"]["reward"], found["good"]["outcome"]) == (1.0, "Completed")
    assert found["names"]["reward"] == 1.0, "names of the setup stay beside those of the services"
    assert "SetupFailed: service 'odd': the task's files could not be written: user 'nobody-here'" in told
    for name in ("ends", "never-ready", "too-large", "no-user"):
        assert (found[name].get("reward"), found[name]["outcome"]) == (None, "InfraFailed"), found[name]
    assert "service 'dead' ended with exit code 3 before it was ready" in told
    assert "cannot start" in told
    assert "service 'sick' was not ready after 1 s" in told
    assert "service 'large'" in told
    assert not subprocess.run(["pgrep", "-f", "sleep 600$"], check=False, capture_output=True).stdout.split()


def test_a_service_has_the_files_and_the_program_of_its_own_image(
    buildah: Buildah, debian: str, tmp_path: Path
) -> None:
    """The task runs on this machine's files, the service on those of an image with a layer of its Dockerfile."""
    (tmp_path / "serve.py").write_text(SERVE)
    container = buildah("from", debian)
    buildah("copy", container, str(tmp_path / "serve.py"), "/serve.py")
    buildah("run", container, "sh", "-c", "useradd -m web; ln -s /serve.py /link; ln /serve.py /hard; mkdir /srv/x")
    buildah("config", "--user", "web", "--env", "NAME=image", "--cmd", '["python3", "/serve.py"]', container)
    image = buildah("commit", "-q", container)
    archive = buildah.archive(image, tmp_path / "web.tar")
    dockerfile = "FROM web\nUSER root\nRUN echo built > /srv/built; rmdir /srv/x\nUSER web\n"
    health = f"test $(id -un)-$NAME = web-image && {GET.format('')}"
    served = {"name": "web", "dockerfile": {"text": dockerfile}, "health": {"command": health, "seconds": 60}}
    checks = [f"{GET.format('built')} | grep -qx built"]
    checks += [f"! {GET.format('')} | grep -q 'href=.x'", "test ! -e /serve.py"]
    own = task("images", served, solution=["true"], verifier={"mode": "Shared", "commands": checks})
    tasks = {"inline": [own], "dockerfiles": {"bases": {"web": f"oci-archive:{archive}"}}}
    write_job(tmp_path, tasks, groupSize=3)
    assert "cannot run in a cluster" in run(tmp_path, "validate", "job.yaml", "--offline")
    run(tmp_path, "run", "job.yaml")
    assert [result["reward"] for result in results(tmp_path)] == [1.0] * 3


def test_tasks_whose_grading_has_new_services_are_named(tmp_path: Path) -> None:
    separate = task("separate", web(), verifier={"commands": ["true"]})
    write_job(tmp_path, {"inline": [task("shared", web()), separate]})
    for told in (run(tmp_path, "validate", "job.yaml"), run(tmp_path, "run", "job.yaml")):
        assert "what agents changed in services is not graded: separate; use mode Shared" in told


def test_verdict_that_a_service_can_change_is_forgeable(tmp_path: Path) -> None:
    """The service runs the agent's file as root, and shares a volume with the verifier."""
    loop = "chmod 777 /srv/app; while sleep 0.1; do test ! -f /srv/app/plugin.sh || sh /srv/app/plugin.sh; done"
    verifier = {
        "user": "root",
        "isolated": True,
        "commands": ["for try in $(seq 200); do grep -q yes /app/answer && exit 0; sleep 0.1; done; exit 1"],
    }
    runs = task(
        "runs",
        {"name": "runs", "command": [loop], "volumes": {"site": "/srv/app"}, "health": {"command": "true"}},
        volumes={"site": "/app"},
        solution=["until test -w .; do sleep 0.1; done; echo 'echo yes > /srv/app/answer' > plugin.sh"],
        verifier=verifier,
    )
    write_job(tmp_path, {"inline": [runs]}, sandbox={"user": "1000:1000", "workingDir": "/app"})
    run(tmp_path, "run", "job.yaml")
    assert [(result["reward"], result["forgeable"]) for result in results(tmp_path)] == [(1.0, True)]


def test_services_live_on_when_their_runner_is_killed(tmp_path: Path) -> None:
    """The agent's row is in a service's memory, so it is lost if the service starts again."""
    serve = (
        "import http.server as h\nseen = []\n"
        "class S(h.BaseHTTPRequestHandler):\n def do_GET(s):\n  seen.append(s.path); s.send_response(200); "
        "s.end_headers(); s.wfile.write(' '.join(seen).encode())\n"
        "h.HTTPServer(('', 8000), S).serve_forever()"
    )
    memory = {"name": "web", "command": ["python3", "-c", serve], "health": {"command": GET.format("health")}}
    calls = [GET.format("first"), "sleep 6", GET.format("second")]
    turns = [{"toolCalls": [{"name": "bash", "arguments": {"command": call}}]} for call in calls]
    turns.append({"toolCalls": [{"name": "finish", "arguments": {"message": "done"}}]})
    check = f"{GET.format('end')} | grep -q 'first /second'"
    held = task("kept", memory, verifier={"mode": "Shared", "commands": [check]})
    script = {"scripted": {"tasks": [{"task": "kept", "members": [{"turns": turns}] * 2}]}}
    write_job(tmp_path, {"inline": [held]}, groupSize=2, model=script, agent={"tools": ["bash", "finish"]})
    log = tmp_path / "log"
    running = subprocess.Popen([ROLLOUTCTL, "run", "job.yaml"], cwd=tmp_path, stderr=log.open("w"))
    until = time.monotonic() + 60
    # The second segments of both journals: the first call has ended, and the second one is under way.
    while len(list((tmp_path / "out").glob("*/attempts/*/0/1-1.jsonl.zst"))) < 2:
        assert time.monotonic() < until, log.read_text()
        assert running.poll() is None, log.read_text()
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    run(tmp_path, "run", "job.yaml")
    assert [(result["reward"], result["attempt"]) for result in results(tmp_path)] == [(1.0, 0), (1.0, 0)]

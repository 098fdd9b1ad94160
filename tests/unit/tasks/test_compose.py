"""Reading docker-compose.yaml of task folders."""

import json
import re
from pathlib import Path

import pytest

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks
from rollout_api.services import ServiceState
from rollout_api.tasks import Task, Tasks
from tests.support.harbor_tasks import hello_world, terminal_bench

COMPOSE = r"""
services:
  client:
    build: {context: ., args: {VERSION: "3", EMPTY: "", UNSET: }, target: last}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", "MODE=${MODE:-plain}", "PRICE=5$$"]
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - shared:/data
      - ./seed:/seed
    depends_on: {db: {condition: service_healthy}}
  db:
    build: {context: db, dockerfile: Postgres.Dockerfile}
    environment: {POSTGRES_PASSWORD: secret, DEBUG: true, PORT: 5432, FROM_HOST: }
    env_file: db/extra.env
    healthcheck:
      test: ["CMD", "pg_isready", "-U", "app user"]
      interval: 2s
      timeout: 1m30s
      retries: 5
      start_period: 10s
    volumes: [pg:/var/lib/postgresql/data, "shared:/shared:ro", "./db/init.sql:/docker-entrypoint-initdb.d/init.sql"]
    user: "70:70"
    ports: ["5432:5432"]
    networks: {default: {aliases: [postgres]}}
    restart: always
  worker:
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    entrypoint: python -m "my worker"
    command: --jobs 2
    working_dir: /srv
    depends_on:
      db: {condition: service_started}
      migrate: {condition: service_completed_successfully}
      client: {condition: service_started}
    healthcheck: {test: "test -e /ready", interval: 1s, timeout: 1s}
    cap_add: [SYS_PTRACE]
  migrate:
    image: registry.example/migrate:1
    hostname: migrations
    healthcheck: {disable: true}
    depends_on: [db]
volumes: {pg: {}, shared: {}}
"""
FILES: dict[str, str | bytes] = {
    "docker-compose.yaml": COMPOSE,
    "Dockerfile": "FROM debian AS first\nFROM debian AS last\nARG VERSION\nRUN echo $VERSION\nWORKDIR /app\n"
    "FROM debian AS other\nWORKDIR /other\n",
    "db/Postgres.Dockerfile": "FROM debian\nCOPY conf /etc/conf\n",
    "db/conf": "max=1\n",
    "db/extra.env": "# comment\nexport EXTRA='a b'\nPASSWORD=\"a\\$b\"\n",
    "db/init.sql": "create table t(x int);\n",
    "seed/words.txt": "one\n",
}


def load(
    folder: Path, form: str = "TerminalBench", environ: dict[str, str] | None = None, variables: tuple[str, ...] = ()
) -> LoadedTasks:
    source = {"uri": str(folder), "format": form, "variables": list(variables)}
    return load_tasks(Tasks.model_validate({"from": source, "dockerfiles": {}}), folder, environ or {})


def task(folder: Path, **environ: str) -> tuple[Task, str]:
    loaded = load(terminal_bench(folder / "t", **FILES), environ=environ, variables=tuple(environ))
    return loaded.tasks[0], "\n".join(map(str, loaded.warnings))


def test_services_have_what_compose_gives_them(tmp_path: Path) -> None:
    found, told = task(tmp_path, FROM_HOST="here")
    db, worker, migrate = found.services
    assert {variable.name: variable.value for variable in db.env} == {
        "EXTRA": "a b",
        "PASSWORD": "a$b",
        "POSTGRES_PASSWORD": "secret",
        "DEBUG": "true",
        "PORT": "5432",
        "FROM_HOST": "here",
    }
    assert db.dockerfile is not None
    assert {file.path for file in db.dockerfile.context} >= {"conf", "Postgres.Dockerfile"}
    assert db.health is not None
    assert (db.health.command, db.health.seconds, db.health.timeout_seconds) == (
        "pg_isready -U 'app user'",
        10 + 5 * (2 + 90),
        90,
    )
    assert db.volumes == {"pg": "/var/lib/postgresql/data", "shared": "/shared"}
    assert [(file.path, file.data()) for file in db.files] == [
        ("/docker-entrypoint-initdb.d/init.sql", b"create table t(x int);\n")
    ]
    assert (db.user, db.aliases) == ("70:70", ["postgres"])
    assert worker.dockerfile is None, "it uses the task's own image"
    assert (worker.command, worker.args, worker.working_dir) == (["python", "-m", "my worker"], ["--jobs", "2"], "/srv")
    assert worker.depends_on == {"db": ServiceState.STARTED, "migrate": ServiceState.COMPLETED}
    assert worker.health is not None
    assert worker.health.command == "test -e /ready"
    assert migrate.dockerfile is not None
    assert (migrate.dockerfile.text, migrate.aliases) == ("FROM registry.example/migrate:1\n", ["migrations"])
    assert migrate.health is not None
    assert migrate.health.command == "true", "instead of the HEALTHCHECK of its image"
    assert "services.worker.cap_add is not supported" in told
    assert "restart" not in told


def test_the_agents_own_service_has_its_environment_volumes_files_and_build(tmp_path: Path) -> None:
    found, _ = task(tmp_path)
    assert {variable.name: variable.value for variable in found.sandbox.env} == {
        "TEST_DIR": "/tests",
        "MODE": "plain",
        "PRICE": "5$",
    }
    assert found.volumes == {"shared": "/data"}
    assert [file.path for file in found.files] == ["/seed/words.txt"]
    assert found.dockerfile is not None
    assert (found.dockerfile.args, found.dockerfile.target) == ({"VERSION": "3", "EMPTY": ""}, "last")
    assert found.sandbox.working_dir == "/app"


def test_an_empty_entrypoint_removes_that_of_the_image(tmp_path: Path) -> None:
    compose = "services:\n  client: {build: .}\n  db: {image: x, entrypoint: [], command: [serve, -v]}\n"
    (found,) = load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).tasks
    assert (found.services[0].command, found.services[0].args) == (["serve", "-v"], [])


def test_scalars_and_variables_are_those_of_docker_compose(tmp_path: Path) -> None:
    compose = """
services:
  client: {build: .}
  db:
    image: x
    user: 33:33
    command: [run, on, 1:30, true, 1e3]
    env_file: db.env
    environment: {A: yes, B: 12:30, C: 1.10, D: 2024-01-01, E: "${X:-${Y:-{y}}}", F: "${HOST:-${X:?}}", G: "${X-", H: 1.0}
"""
    lines = "I=1 # comment\nJ='$HOST' # no variable\nK=\"a\\n${HOST}\"\nL=$HOST\nHOST\nGONE\nM=a#b\nN: n:1 # comment\n"
    folder = terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose, "db.env": lines})
    loaded = load(folder, environ={"HOST": "host", "I": "key"}, variables=("HOST",))
    (db,) = loaded.tasks[0].services
    assert (db.user, db.args) == ("33:33", ["run", "on", "1:30", "true", "1000"])
    assert {variable.name: variable.value for variable in db.env} == {
        "A": "yes",
        "B": "12:30",
        "C": "1.1",
        "D": "2024-01-01",
        "E": "{y}",
        "F": "host",
        "G": "${X-",
        "H": "1",
        "I": "1",
        "J": "$HOST",
        "K": "a\nhost",
        "L": "host",
        "HOST": "host",
        "M": "a#b",
        "N": "n:1",
    }
    assert "environment variable" not in "\n".join(map(str, loaded.warnings))


def test_task_has_only_those_variables_of_the_runner_that_the_job_lists(tmp_path: Path) -> None:
    lines = "environment: [API_KEY, 'TOKEN=$API_KEY', 'A=${API_KEY:-none}', 'B=${API_KEY+set}'], env_file: [own.env]"
    compose = {"docker-compose.yaml": f"services: {{client: {{build: ., {lines}}}}}", "own.env": "API_KEY\nC=$API_KEY"}
    terminal_bench(tmp_path / "t", **compose)
    hello_world(tmp_path / "h", 'env = { KEY = "${API_KEY:-none}", ROOT = "${ROOT_FOLDER:-/}" }\n')
    for folder, form in (("t", "TerminalBench"), ("h", "Harbor")):
        loaded = load(tmp_path / folder, form, {"API_KEY": "secret"})
        told = "\n".join(map(str, loaded.warnings))
        assert "secret" not in told + loaded.tasks[0].model_dump_json()
        assert "does not get the environment variable API_KEY: tasks.from.variables does not list it" in told
        loaded = load(tmp_path / folder, form, {"API_KEY": "secret"}, ("API_KEY",))
        assert "secret" in loaded.tasks[0].model_dump_json()
    hello_world(tmp_path / "h", 'env = { KEY = "${API_KEY}" }\n')
    with pytest.raises(
        TaskSourceError, match=r"needs the environment variable API_KEY; list it in tasks\.from\.variables"
    ):
        load(tmp_path / "h", "Harbor", {"API_KEY": "secret"})


@pytest.mark.parametrize("form", ["TerminalBench", "Harbor"])
def test_own_service_is_built_from_the_dockerfile_and_context_that_it_names(tmp_path: Path, form: str) -> None:
    own, folder = ("client", "") if form == "TerminalBench" else ("main", "environment/")
    files = {
        f"{folder}docker-compose.yaml": f"services: {{{own}: {{build: {{context: app, dockerfile: Agent.Dockerfile}}}}}}",
        f"{folder}Dockerfile": "FROM debian\nWORKDIR /wrong\n",
        f"{folder}app/Agent.Dockerfile": "FROM debian\nCOPY x /x\nWORKDIR /right\n",
        f"{folder}app/x": "1",
    }
    write = terminal_bench if form == "TerminalBench" else hello_world
    (found,) = load(write(tmp_path / "t", **files), form).tasks
    assert found.dockerfile is not None
    assert "COPY x" in found.dockerfile.text
    assert {file.path for file in found.dockerfile.context} == {"x", "Agent.Dockerfile"}
    if form == "TerminalBench":  # the Harbor folder has a workdir
        assert found.sandbox.working_dir == "/right"


@pytest.mark.parametrize("has_own", [True, False])
def test_service_is_built_with_the_ignore_file_of_its_own_dockerfile(tmp_path: Path, *, has_own: bool) -> None:
    compose = (
        "services:\n  client: {build: .}\n  api: {build: {context: ., dockerfile: api/Dockerfile}, command: serve}\n"
    )
    files = {"docker-compose.yaml": compose, "api/Dockerfile": "FROM debian\n", "Dockerfile.dockerignore": "api\n"}
    if has_own:
        files["api/Dockerfile.dockerignore"] = "secret\n"
    (found,) = load(terminal_bench(tmp_path / "t", **files)).tasks
    ignored = [
        [file.data().decode() for file in dockerfile.context if file.path == "Dockerfile.dockerignore"]
        for dockerfile in (found.dockerfile, found.services[0].dockerfile)
        if dockerfile is not None
    ]
    assert ignored == [["api\n"], ["secret\n"] if has_own else []]


def test_own_service_of_an_image_alone_starts_from_that_image(tmp_path: Path) -> None:
    folder = terminal_bench(tmp_path / "t", **{"docker-compose.yaml": "services: {app: {image: x/app:1}}"})
    (folder / "Dockerfile").unlink()
    (found,) = load(folder).tasks
    assert found.dockerfile is not None
    assert found.dockerfile.text == "FROM x/app:1\n"


def test_variables_of_env_file_and_project_name_are_filled_in(tmp_path: Path) -> None:
    compose = """
services:
  client: {build: ., environment: {A: "${A}", B: "${B}", URL: "http://web-${COMPOSE_PROJECT_NAME}"}}
  web: {image: x, command: serve, networks: {default: {aliases: ["web-${COMPOSE_PROJECT_NAME}"]}}}
"""
    folder = terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose, ".env": "A=file\nB=file\n"})
    (found,) = load(folder, environ={"A": "no", "B": "environment"}, variables=("B",)).tasks
    assert {variable.name: variable.value for variable in found.sandbox.env} == {
        "A": "file",
        "B": "environment",
        "URL": "http://web-task",
    }
    assert found.services[0].aliases == ["web-task"]


def test_link_is_a_dependency(tmp_path: Path) -> None:
    compose = "services: {client: {build: .}, web: {image: x, links: [client, 'db:database']}, db: {image: x}}"
    (found,) = load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).tasks
    assert {service.name: service.depends_on for service in found.services} == {
        "web": {"db": ServiceState.STARTED},
        "db": {},
    }


def test_names_of_variables_may_have_dots(tmp_path: Path) -> None:
    compose = "services: {client: {build: .}, search: {image: x, environment: [discovery.type=single-node]}}"
    (found,) = load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).tasks
    assert [(one.name, one.value) for one in found.services[0].env] == [("discovery.type", "single-node")]


def test_own_command_and_read_only_volume_without_effect_are_reported(tmp_path: Path) -> None:
    compose = """
services:
  client: {build: ., command: sh -c "sshd && exec server", volumes: ["log:/log:ro", "own:/own:ro"]}
  api: {build: ., command: serve, volumes: ["log:/log"]}
"""
    told = "\n".join(map(str, load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).warnings))
    assert "services.client.command is not started" in told
    assert "services.client.volumes: log is not read-only: the agent can write into it" in told
    assert "own is not read-only" not in told


@pytest.mark.parametrize(
    ("command", "is_idle"),
    [
        ('["sh", "-c", "sleep infinity"]', True),
        ("tail -f /dev/null", True),
        ("/bin/bash", True),
        ("bash -lc 'while true; do sleep 3600; done'", True),
        ('["sh", "-c", "exec sleep 1d & wait"]', True),
        ('["sh", "-c", "/start.sh && sleep infinity"]', False),
        ("bash -c 'service ssh start; tail -f /dev/null'", False),
        ("serve --verbose=true", False),
        ("/opt/sleep-api/run", False),
    ],
)
def test_program_beside_the_agent_is_reported_also_before_a_sleep(tmp_path: Path, command: str, is_idle: bool) -> None:
    compose = f"services:\n  client:\n    build: .\n    command: {command}\n"
    told = "\n".join(map(str, load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).warnings))
    assert ("services.client.command is not started" not in told) == is_idle


DOTENV = """
BASE=/srv
DATA=${BASE}/data
CERT="first # line
last \\" line"
TWO='a
b'
AFTER=x
OPEN="never closed
"""


def test_env_file_uses_its_earlier_lines_and_has_values_of_several_lines(tmp_path: Path) -> None:
    expected = {"DATA": "/srv/data", "CERT": 'first # line\nlast " line', "TWO": "a\nb", "AFTER": "x"}
    client = "services:\n  client:\n    build: .\n"
    env_file = f"{client}    env_file: .env\n"
    environment = f"{client}    environment: {json.dumps([f'{name}=${{{name}}}' for name in expected])}\n"
    for number, compose in enumerate((env_file, environment)):
        folder = terminal_bench(tmp_path / str(number), **{"docker-compose.yaml": compose, ".env": DOTENV})
        (task,) = load(folder).tasks
        found = {variable.name: variable.value for variable in task.sandbox.env}
        assert {name: found[name] for name in expected} == expected


def test_arguments_of_a_build_of_wrong_type_are_refused(tmp_path: Path) -> None:
    compose = "services:\n  client: {build: {args: 5}}\n"
    with pytest.raises(TaskSourceError, match=r"build\.args: 5 is not supported, expected a list or a mapping"):
        load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose}))


ALIASES = "\n".join(f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]" for n in range(12))


@pytest.mark.parametrize(
    "compose",
    [
        f"{ALIASES}\nservices: {{client: {{build: ., x-a: *a11}}}}\n",
        "services: {client: &a {build: ., x-a: *a}}\n",
        f"services: {{client: {{build: ., x-a: {'[' * 2000}{']' * 2000}}}}}\n",
    ],
)
def test_file_with_endless_content_is_refused(tmp_path: Path, compose: str) -> None:
    folder = terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})
    with pytest.raises(TaskSourceError, match=r"write it without aliases|is not a mapping with services"):
        load(folder)


def test_the_tasks_whole_folder_can_be_mounted(tmp_path: Path) -> None:
    compose = "services:\n  client: {build: .}\n  web: {build: ., command: serve, volumes: ['./:/srv']}\n"
    (web,) = load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose})).tasks[0].services
    assert {"/srv/Dockerfile", "/srv/docker-compose.yaml"} <= {file.path for file in web.files}


NEEDS = """
services:
  client: {build: ., depends_on: {seed: {condition: service_completed_successfully}, db: }, links: ["db:database"]}
  seed: {build: ., command: seed, depends_on: [db]}
  db: {build: ., command: serve}
  debugger: {build: ., command: debug, profiles: [debug]}
"""


def test_agent_waits_for_services_that_complete_and_those_with_profiles_are_left_out(tmp_path: Path) -> None:
    loaded = load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": NEEDS}))
    services = {service.name: service for service in loaded.tasks[0].services}
    assert {name: service.completes for name, service in services.items()} == {"seed": True, "db": False}
    assert services["db"].aliases == ["database"]
    assert "services.debugger has profiles, so it is not started" in "\n".join(map(str, loaded.warnings))


def test_problems_of_the_agents_own_service_are_reported(tmp_path: Path) -> None:
    compose = "services:\n  client: {build: ., volumes: [./gone:/data], depends_on: [databse]}\n  db: {image: x}\n"
    with pytest.raises(TaskSourceError, match=r"services\.client depends on 'databse', which is not a service"):
        load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose}))
    compose = compose.replace("databse", "db")
    told = load(terminal_bench(tmp_path / "u", **{"docker-compose.yaml": compose})).warnings
    assert "services.client.volumes: ./gone is not in the task's folder, and is not mounted" in "\n".join(
        map(str, told)
    )


def test_harbor_folders_have_services_beside_main(tmp_path: Path) -> None:
    compose = "services:\n  main: {environment: {A: b}}\n  cache: {build: ./cache, command: redis-server --port 7}\n"
    hello_world(
        tmp_path / "hello",
        **{"environment/docker-compose.yaml": compose, "environment/cache/Dockerfile": "FROM debian\n"},
    )
    (found,) = load(tmp_path, "Harbor").tasks
    (cache,) = found.services
    assert cache.args == ["redis-server", "--port", "7"]
    assert cache.dockerfile is not None
    assert {variable.name: variable.value for variable in found.sandbox.env} == {"A": "b"}


def test_healthcheck_of_a_harbor_task_with_services_runs_beside_them(tmp_path: Path) -> None:
    compose = "services:\n  main: {build: .}\n  cache: {image: redis, command: redis-server}\n"
    folder = hello_world(tmp_path / "hello", **{"environment/docker-compose.yaml": compose})
    config = folder / "task.toml"
    config.write_text(config.read_text() + '\n[environment.healthcheck]\ncommand = "redis-cli -h cache ping"\n')
    (found,) = load(tmp_path, "Harbor").tasks
    cache, check = found.services
    assert (cache.completes, check.completes, check.dockerfile) == (False, True, None)
    assert "redis-cli -h cache ping" in check.command[0]
    assert "redis-cli" not in str(found.setup)


BROKEN = {
    "db.build: db/Dockerfile is missing": "db: {build: db}",
    "services.db has neither build nor image": "db: {command: x}",
    "services.db.env_file: no.env is missing": "db: {image: x, env_file: no.env}",
    "'soon' is no duration": "db: {image: x, healthcheck: {test: x, interval: soon}}",
    "services a and b use the same port 80": "a: {image: x, ports: ['8080:80']}\n  b: {image: x, expose: [80]}",
    "needs the environment variable KEY": "db: {image: x, environment: {KEY: '${KEY:?give one}'}}",
    "depends on 'other', which is not a service": "db: {image: x, depends_on: [other]}",
    "services.db.depends_on.a.condition: 'service_health' is not a condition": (
        "a: {image: x}\n  db: {image: x, depends_on: {a: {condition: service_health}}}"
    ),
    "services a, b wait for each other": "a: {image: x, depends_on: [b]}\n  b: {image: x, depends_on: [a]}",
    "needs rights on the machine": "db: {image: x, privileged: true}",
    "cannot be a volume's folder": "db: {image: x, volumes: ['v:/proc/x']}",
    "'//proc/x' cannot be a volume's folder": "db: {image: x, volumes: ['v://proc/x']}",
    "services.db.ports: 80 is not supported, expected a list": "db: {image: x, ports: 80}",
    "services.db.volumes: 'v:/x' is not supported, expected a list": "db: {image: x, volumes: 'v:/x'}",
    "services.db.depends_on: 'a' is not supported, expected a list or a mapping": "db: {image: x, depends_on: a}",
    "services.db.depends_on: {'a': 5} is not supported": "db: {image: x, depends_on: {a: 5}}",
    "services.db.build: 5 is not supported, expected a text or a mapping": "db: {build: 5}",
    "services.db.healthcheck.test: {'a': 1} is not supported": "db: {image: x, healthcheck: {test: {a: 1}}}",
    "services.db.command: an empty one is not supported": "db: {image: x, command: []}",
    "services.db: entrypoint is empty, so command must be": "db: {image: x, entrypoint: ''}",
    "extends is not supported": "db: {extends: other}",
    "is not a mapping with services": "db: [",
}


@pytest.mark.parametrize(("message", "service"), BROKEN.items(), ids=BROKEN)
def test_what_cannot_run_is_refused_with_the_reason(message: str, service: str, tmp_path: Path) -> None:
    compose = f"services:\n  client: {{build: .}}\n  {service}\n"
    with pytest.raises(TaskSourceError, match=re.escape(message)):
        load(terminal_bench(tmp_path / "t", **{"docker-compose.yaml": compose}))

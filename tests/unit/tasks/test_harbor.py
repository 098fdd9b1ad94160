"""Reading Harbor's task folders: the tasks, and what is reported about unsupported parts."""

import os
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks
from agent_runtime.tasks.source import needed_images
from rollout_api.sandbox import Network
from rollout_api.tasks import Task, Tasks, VerifierMode
from tests.support.harbor_tasks import hello_world, in_two_steps, write_folder

SEPARATE = '\n[verifier]\nenvironment_mode = "separate"\n'


def load(
    folder: Path, environ: dict[str, str] | None = None, template: str | None = None, **source: object
) -> LoadedTasks:
    form = {"from": {"uri": str(folder), "format": "Harbor", **source}, "imageTemplate": template}
    return load_tasks(Tasks.model_validate(form), folder, environ or {})


def one(folder: Path, environ: dict[str, str] | None = None, template: str | None = None) -> Task:
    (task,) = load(folder, environ, template).tasks
    return task


def refused(folder: Path) -> str:
    with pytest.raises(TaskSourceError) as caught:
        load(folder)
    return str(caught.value)


def with_config(folder: Path, text: str, **files: str | bytes) -> Path:
    """Return a task whose environment has only these keys."""
    hello_world(folder, **files)
    (folder / "task.toml").write_text(text)
    return folder


def test_a_folder_is_a_task_and_so_is_each_below_one(tmp_path: Path) -> None:
    hello_world(tmp_path / "set" / "b")
    hello_world(tmp_path / "set" / "deep" / "a")
    assert one(tmp_path / "set" / "b").name == "b"
    assert [task.name for task in load(tmp_path / "set").tasks] == ["b", "a"]
    assert [task.name for task in load(tmp_path / "set", limit=1).tasks] == ["b"]
    assert [task.name for task in load(tmp_path / "set", filter={"name": ["a*"]}).tasks] == ["a"]
    assert len(load(tmp_path / "set", filter={"difficulty": ["easy"]}).tasks) == 2


def test_the_prompt_has_no_canary_and_the_tests_are_hidden_files(tmp_path: Path) -> None:
    binary = bytes(range(256)) * 4096
    task = one(hello_world(tmp_path / "t", **{"tests/data/big.bin": binary}, **{"solution/helper": "x"}))
    assert task.prompt == "Write `Hello, world!` into hello.txt.\n"
    assert task.verifier is not None
    hidden = {file.path: file for file in task.verifier.files}
    assert (hidden["/tests/test.sh"].mode, hidden["/tests/data/big.bin"].mode) == ("755", "644")
    assert hidden["/tests/data/big.bin"].data() == binary
    assert {file.path for file in task.solution_files} == {"/solution/solve.sh", "/solution/helper"}
    assert task.verifier.commands == ["/bin/bash /tests/test.sh"]
    assert {file.path for file in task.files} == {"/logs/agent/.rollout", "/logs/artifacts/.rollout"}


def test_settings_of_a_task_become_ours(tmp_path: Path) -> None:
    folder = with_config(
        tmp_path / "t",
        "[agent]\ntimeout_sec = 90.5\nuser = 1000\n"
        "[verifier]\ntimeout_sec = 30\nenv = { K = '${KEY}', D = '${NO:-d}', E = '${EMPTY:-d}' }\n"
        "[environment]\ndocker_image = 'i:1'\ncpus = 2\nmemory = '2G'\nstorage_mb = 100\nworkdir = '/w'\n"
        "allow_internet = false\n[environment.healthcheck]\ncommand = 'true'\n",
    )
    (task,) = load(folder, {"KEY": "secret", "EMPTY": ""}, variables=["KEY", "EMPTY"]).tasks
    sandbox, verifier = task.sandbox, task.verifier
    assert verifier is not None
    assert (task.timeouts.agent_seconds, task.timeouts.verifier_seconds) == (91, 30)
    assert (sandbox.image, sandbox.user, verifier.user, sandbox.working_dir) == ("i:1", "1000", "root", "/w")
    assert sandbox.resources is not None
    assert (sandbox.resources.cpu, sandbox.resources.memory, sandbox.resources.disk) == ("2", "2048Mi", "100Mi")
    assert {variable.name: variable.value for variable in verifier.env} == {"K": "secret", "D": "d", "E": ""}
    assert verifier.mode is VerifierMode.SHARED
    assert "timeout 30 sh -c true" in task.setup[-1]
    assert "needs the environment variable KEY; list it in tasks.from.variables" in refused(folder)


NETWORKS = {
    "": ("Public", "Public", "Public"),
    "[environment]\nnetwork_mode = 'no-network'\n": ("None", "None", "None"),
    "[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'public'\n": ("None", "Public", "None"),
    "[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']\n": (
        "None",
        "None",
        ["a.example:443", "a.example:80"],
    ),
    "[environment]\nnetwork_mode = 'no-network'\n[verifier.environment]\nnetwork_mode = 'public'\n": (
        "None",
        "None",
        "Public",
    ),
}


@pytest.mark.parametrize(("config", "expected"), NETWORKS.items())
def test_each_phase_has_the_network_of_the_task(config: str, expected: tuple[object, ...], tmp_path: Path) -> None:
    network = one(with_config(tmp_path / "t", config)).sandbox.network
    assert network is not None
    assert (network.setup, network.agent, network.verifier) == expected


def test_built_dockerfile_has_a_network_when_the_task_has_none(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "t", "[environment]\nallow_internet = false\n")
    tasks = Tasks.model_validate({"from": {"uri": str(folder), "format": "Harbor"}, "dockerfiles": {}})
    (task,) = load_tasks(tasks, folder, {}).tasks
    assert task.dockerfile is not None
    assert task.sandbox.network == Network(setup="Public", agent="None", verifier="None")


def test_script_without_an_interpreter_is_run_by_bash_if_there_is_one(tmp_path: Path) -> None:
    folder = hello_world(tmp_path / "t", **{"tests/test.sh": "source env\n", "solution/solve.sh": "#!/bin/sh\n:\n"})
    task = one(folder)
    assert task.verifier is not None
    assert task.verifier.commands == ['"$(command -v bash || echo /bin/sh)" /tests/test.sh']
    assert task.solution[0].endswith("\n/bin/sh /solution/solve.sh")


@pytest.mark.parametrize("key", ["schema_version", "version"])
def test_version_that_harbor_does_not_have_is_reported(key: str, tmp_path: Path) -> None:
    loaded = load(with_config(tmp_path / "t", f"{key} = '2.0'"))
    assert [task.name for task in loaded.tasks] == ["t"]
    assert any(f"{key} '2.0' is not a schema of Harbor" in str(warning) for warning in loaded.warnings)


def test_wildcard_host_is_reported_and_not_reachable(tmp_path: Path) -> None:
    config = "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.example', '::1']\n"
    loaded = load(with_config(tmp_path / "t", config))
    network = loaded.tasks[0].sandbox.network
    assert network is not None
    assert network.agent == ["[::1]:443", "[::1]:80"]
    assert any("*.example is not reachable" in str(warning) for warning in loaded.warnings)


BROKEN = {
    "task.toml: is not TOML": {"task.toml": "a = ["},
    "task.toml:2: agent.timeout_sec: is 'x', expected a whole number or a number": {
        "task.toml": "[agent]\ntimeout_sec = 'x'"
    },
    "task.toml:2: environment.tpu": {"task.toml": "[environment]\ntpu = { type = 'v4', topology = '2x2' }"},
    "environment.os: is not linux": {"task.toml": "[environment]\nos = 'Windows'"},
    "needs services for the grading alone": {"tests/docker-compose.yaml": "services: {}"},
    "instruction.md: is empty": {"instruction.md": "# canary\n"},
    "verifier.environment_mode: is 'own', expected shared or separate": {
        "task.toml": "[verifier]\nenvironment_mode = 'own'"
    },
    "is only for environment_mode separate": {
        "task.toml": "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1"
    },
    "'/' cannot be an artifact": {
        "task.toml": "artifacts = ['/']\n[environment]\nworkdir = '/a'\n[verifier]\nenvironment_mode = 'separate'"
    },
}


@pytest.mark.parametrize(("message", "files"), BROKEN.items(), ids=BROKEN)
def test_folder_that_cannot_be_a_task_gives_the_reason(
    message: str, files: dict[str, str | bytes], tmp_path: Path
) -> None:
    assert message in refused(hello_world(tmp_path / "t", **files))


def test_every_broken_folder_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (hello_world(tmp_path / name) / "tests" / "test.sh").unlink()
    told = refused(tmp_path)
    assert "a/tests/test.sh: is missing" in told
    assert "b/tests/test.sh: is missing" in told


def test_folders_that_cannot_be_tasks_may_be_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        hello_world(tmp_path / name)
    (tmp_path / "a" / "tests" / "test.sh").unlink()
    hello_world(tmp_path / "below" / "b")
    found = load(tmp_path, skipUnusable=True, limit=2)
    assert [task.name for task in found.tasks] == ["b", "c"]
    (warning,) = [str(warning) for warning in found.warnings if "left out" in str(warning)]
    assert "2 of 4 tasks cannot be used and are left out" in warning
    assert "a/tests/test.sh: is missing" in warning
    for name in ("b", "c", "d", "below/b"):
        (tmp_path / name / "tests" / "test.sh").unlink()
    with pytest.raises(TaskSourceError, match=r"d/tests/test\.sh: is missing"):
        load(tmp_path, skipUnusable=True, limit=2)


@pytest.mark.parametrize("script", ["tests/test.sh", "solution/solve.sh"])
def test_shell_script_with_windows_line_ends_is_refused_with_its_path(tmp_path: Path, script: str) -> None:
    """bash would report a syntax error, and each solution would get 0."""
    hello_world(tmp_path / "t", **{script: b"#!/bin/bash\r\nif true; then\r\n  true\r\nfi\r\n"})
    assert f"{script}: has Windows line ends" in refused(tmp_path)
    hello_world(tmp_path / "t", **{script: b"#!/bin/bash\nprintf 'a\r\n' > file\n"})
    assert one(tmp_path / "t").name == "t"


def test_links_and_special_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    tests = hello_world(tmp_path / "t") / "tests"
    (tests / "passwd").symlink_to("/etc/passwd")
    (tests / "dangling").symlink_to("nothing")
    (tests / "loop").symlink_to("loop")
    (hello_world(tmp_path / "u") / "folder").symlink_to("tests")
    os.mkfifo(tmp_path / "u" / "pipe")
    told = refused(tmp_path).splitlines()
    assert {(line.split(": ")[0].rpartition("/")[2], line.split(": ")[1][:26]) for line in told} == {
        ("passwd", "is a link out of the task'"),
        ("dangling", "is a dangling link; remove"),
        ("loop", "is a dangling link; remove"),
        ("folder", "is a link to a folder; rep"),
        ("pipe", "is not a regular file; rem"),
    }


@pytest.mark.parametrize("target", ["nothing", "../shared.toml"])
def test_settings_that_are_a_link_out_of_the_folder_are_refused_and_other_tasks_used(
    tmp_path: Path, target: str
) -> None:
    (tmp_path / "shared.toml").write_text("")
    hello_world(tmp_path / "good")
    config = hello_world(tmp_path / "linked") / "task.toml"
    config.unlink()
    config.symlink_to(target)
    assert "linked/task.toml: is a " in refused(tmp_path)
    assert [task.name for task in load(tmp_path, skipUnusable=True).tasks] == ["good"]
    filtered = load(tmp_path, skipUnusable=True, filter={"name": ["good", "linked"]})
    assert [task.name for task in filtered.tasks] == ["good"]


def test_unsupported_field_is_reported_once_for_all_tasks(tmp_path: Path) -> None:
    for name in "abc":
        hello_world(tmp_path / name, 'gpus = 1\nskills_dir = "/s"\nunheard = 1\n')
    told = [str(warning) for warning in load(tmp_path).warnings]
    assert any("a/task.toml:14: environment.gpus is not supported" in line and "2 more tasks" in line for line in told)
    assert any("environment.skills_dir is not supported" in line for line in told)
    assert any("environment.unheard is not supported: is not a key" in line for line in told)


def test_image_is_named_after_its_build_context(tmp_path: Path) -> None:
    folder = hello_world(tmp_path / "My.Task", SEPARATE, **{"tests/Dockerfile": "FROM scratch\n"})
    first = one(folder, template="registry.example/{name}:{digest}")
    assert first.verifier is not None
    image, grading = first.sandbox.image, first.verifier.image
    assert image is not None
    assert image.startswith("registry.example/my.task:")
    assert grading is not None
    assert grading.startswith("registry.example/my.task-tests:")
    (folder / "environment" / "more").write_text("x")
    assert one(folder, template="registry.example/{name}:{digest}").sandbox.image != image
    tasks = Tasks.model_validate(
        {"from": {"uri": str(folder), "format": "Harbor"}, "imageTemplate": "r/{name}:{digest}"}
    )
    assert [build.context for build in needed_images(tasks, tmp_path, {})] == ["environment", "tests"]


def test_one_image_cannot_stand_for_two_dockerfiles(tmp_path: Path) -> None:
    hello_world(tmp_path / "Fix")
    hello_world(tmp_path / "fix", **{"environment/more": "x"})
    with pytest.raises(TaskSourceError, match=r"r/fix would also be the image of .*Fix, .*; add \{digest\}"):
        load(tmp_path, template="r/{name}")
    assert len(load(tmp_path, template="r/{name}:{digest}").tasks) == 2


def test_dockerfile_without_a_template_is_reported_as_unused(tmp_path: Path) -> None:
    told = [str(warning) for warning in load(hello_world(tmp_path / "t")).warnings]
    assert any("environment/Dockerfile: is not built" in line for line in told)


def load_dockerfiles(folder: Path, **dockerfiles: object) -> LoadedTasks:
    form = {"from": {"uri": str(folder), "format": "Harbor"}, "dockerfiles": dockerfiles}
    return load_tasks(Tasks.model_validate(form), folder, {})


def test_dockerfile_is_built_by_the_job_with_its_context(tmp_path: Path) -> None:
    folder = hello_world(
        tmp_path / "t", SEPARATE, **{"environment/run.sh": "#!/bin/sh\n", "tests/Dockerfile": "FROM b\n"}
    )
    ((task,), warnings) = (load_dockerfiles(folder).tasks, load_dockerfiles(folder).warnings)
    assert task.dockerfile is not None
    assert task.dockerfile.text == "FROM debian:bookworm-slim\nWORKDIR /app\n"
    assert [(file.path, file.mode) for file in task.dockerfile.context] == [("Dockerfile", "644"), ("run.sh", "644")]
    assert (task.sandbox.image, task.sandbox.working_dir) == (None, "/app")
    assert task.verifier is not None
    assert task.verifier.dockerfile is not None
    assert task.verifier.dockerfile.text == "FROM b\n"
    assert not [warning for warning in warnings if "not built" in str(warning)]


def test_build_context_keeps_links_and_modes(tmp_path: Path) -> None:
    folder = hello_world(tmp_path / "t", **{"environment/script.sh": "#!/bin/sh\n", "environment/data/x": "x"})
    environment = folder / "environment"
    (environment / "script.sh").chmod(0o640)
    for name, target in {"file": "script.sh", "folder": "data", "gone": "nothing", "out": "/etc/passwd"}.items():
        (environment / name).symlink_to(target)
    (task,) = load_dockerfiles(folder).tasks
    assert task.dockerfile is not None
    assert {(file.path, file.link, file.mode) for file in task.dockerfile.context} >= {
        ("script.sh", None, "640"),
        ("file", "script.sh", "644"),
        ("folder", "data", "644"),
        ("gone", "nothing", "644"),
        ("out", "/etc/passwd", "644"),
    }
    assert "gone: is a dangling link" in refused(tmp_path / "t")


def test_image_of_the_task_comes_before_its_dockerfile(tmp_path: Path) -> None:
    folder = hello_world(tmp_path / "t", 'docker_image = "given:1"\n')
    (task,) = load_dockerfiles(folder).tasks
    assert (task.sandbox.image, task.dockerfile) == ("given:1", None)


def test_dockerfile_that_cannot_be_built_is_refused_with_its_lines(tmp_path: Path) -> None:
    text = "FROM debian\nADD https://example/x /x\nRUN --network=host true\nFROM $BASE\n"
    folder = hello_world(tmp_path / "t", **{"environment/Dockerfile": text})
    with pytest.raises(TaskSourceError) as caught:
        load_dockerfiles(folder)
    assert "environment/Dockerfile:4: FROM $BASE: no image; give the ARG" in str(caught.value)
    with pytest.raises(TaskSourceError) as caught:
        load_dockerfiles(hello_world(folder, **{"environment/Dockerfile": text.replace("$BASE", "debian")}))
    assert "environment/Dockerfile:2: ADD https://example/x: remote sources are not supported" in str(caught.value)
    assert "environment/Dockerfile:3: RUN --network=host is not supported" in str(caught.value)


def test_steps_have_their_own_prompts_gates_and_tests(tmp_path: Path) -> None:
    task = one(in_two_steps(tmp_path / "t", gate=0.5))
    write, double = task.steps
    assert (write.min_rewards, double.min_rewards) == ({"reward": 0.5}, {})
    assert [file.path for file in double.files] == ["given.txt", "setup.sh"]
    assert double.setup == ["bash ./setup.sh"]
    assert (task.prompt, task.verifier, task.has_solution) == (write.prompt, None, True)


def test_step_without_tests_uses_those_of_the_task(tmp_path: Path) -> None:
    folder = in_two_steps(tmp_path / "t")
    (folder / "steps/write/tests/test.sh").unlink()
    write_folder(folder, {"tests/test.sh": "true", "tests/common.py": "x = 1"})
    (task,) = load(folder).tasks
    assert [[file.path for file in step.verifier.files] for step in task.steps if step.verifier] == [
        ["/tests/common.py", "/tests/test.sh"],
        ["/tests/common.py", "/tests/test.sh"],
    ]


@pytest.mark.parametrize(
    "config",
    [
        "[verifier]\nenvironment_mode = 'separate'\ncollect = 5\n",
        "artifacts = [1]\n[verifier]\nenvironment_mode = 'separate'\n",
        "[metadata]\ntags = 0\n",
        "steps = [[1]]\n",
        "environment = [1]\n",
        "metadata = 3\n",
        "x = " + "[" * 5000,
    ],
)
@pytest.mark.parametrize("wanted", [{}, {"filter": {"difficulty": ["easy"]}}], ids=["all", "filtered"])
def test_a_folder_with_odd_values_is_left_out_like_any_other(
    tmp_path: Path, config: str, wanted: dict[str, Any]
) -> None:
    hello_world(tmp_path / "tasks" / "good")
    (hello_world(tmp_path / "tasks" / "odd") / "task.toml").write_text(config)
    assert [task.name for task in load(tmp_path, skipUnusable=True, **wanted).tasks] == ["good"]

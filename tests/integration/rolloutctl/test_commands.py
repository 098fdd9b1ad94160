"""The real command line, run like a person or a script does: exit codes, the contents of both streams, and error
messages.
"""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.support.preloaded import run_rolloutctl


@dataclass(frozen=True)
class Shell:
    """Runs commands in a folder."""

    program: Sequence[str]
    folder: Path

    def __call__(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return run_rolloutctl(*arguments, folder=self.folder, environ=environ)

    def run_interpreter(self, *arguments: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a program in a new interpreter with this environment."""
        return subprocess.run(
            [*self.program, *arguments],
            cwd=self.folder,
            env=os.environ | dict(environ),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.program, *arguments], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture
def shell(rolloutctl_program: list[str], tmp_path: Path) -> Shell:
    return Shell(rolloutctl_program, tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, rolloutctl_program: list[str]) -> Shell:
    """A folder in which the starter job has been run."""
    shell = Shell(rolloutctl_program, tmp_path_factory.mktemp("finished"))
    assert shell("init").returncode == 0
    run = shell("run", "job.yaml")
    assert run.returncode == 0, run.stderr
    return shell


def slow_job(folder: Path, delay: float, *, first: float | None = None, **spec: object) -> Path:
    """Write a job whose model takes `delay` seconds a turn, and `first` seconds for the first one of each rollout if
    given.
    """
    source = Path(__file__).parents[3] / "rolloutctl" / "starter.yaml"
    job = yaml.safe_load(source.read_text())
    job["metadata"]["name"] = "slow"
    job["spec"] |= {"runners": {"concurrency": 2}} | spec
    for task in job["spec"]["model"]["scripted"]["tasks"]:
        for member in task["members"]:
            for number, turn in enumerate(member["turns"]):
                turn["delaySeconds"] = delay if number or first is None else first
    path = folder / "slow.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """Wait until a file exists, while the process runs."""
    for _ in range(1200):
        if list(folder.glob(pattern)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{pattern} did not appear in 60 s")


# ---------------------------------------------------------------- a first hour


def test_manifest_of_init_is_valid_and_runs(finished: Shell) -> None:
    assert finished("validate", "job.yaml").stdout == "job.yaml is valid: 2 tasks × groupSize 3 = 6 rollouts.\n"
    checked = finished("check", "job.yaml", "-o", "json")
    assert checked.returncode == 0, checked.stderr
    rows = json.loads(checked.stdout)
    assert [(row["agent"], row["ok"]) for row in rows] == [("Oracle", True), ("Nop", True)] * 2
    results = json.loads(finished("results", "starter", "-o", "json").stdout)
    assert [result["reward"] for result in results] == [1, 1, 0, 1, 1, 0]
    files = [path for path in (finished.folder / "out").rglob("*") if path.is_file()]
    assert len(files) <= 6 * 5 + 6, "5 files a rollout, and those of the run"


def test_init_does_not_overwrite_work(finished: Shell) -> None:
    again = finished("init")
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert "--force" in again.stderr


def test_run_reports_on_stderr_and_prints_its_result_on_stdout(finished: Shell) -> None:
    run = finished("run", "job.yaml")
    assert run.returncode == 0
    assert "fix-add" in run.stdout
    assert "6 of 6 rollouts, mean reward 0.667" in run.stdout
    assert "Resuming starter: 6 of 6" in run.stderr
    assert re.search(r"rolloutctl show starter-\w+ 2 ", run.stderr), "the first rollout with the lowest reward"


def test_json_is_all_that_is_on_stdout(finished: Shell) -> None:
    summary = json.loads(finished("run", "job.yaml", "-o", "json").stdout)
    assert summary["completed"] is True
    assert summary["outcomes"]["Completed"] == 6
    assert json.loads(finished("validate", "job.yaml", "-o", "json").stdout)["rollouts"] == 6
    assert json.loads(finished("show", "starter", "0", "-o", "json").stdout)["schema_version"] == "ATIF-v1.7"
    assert len(json.loads(finished("gc", "--keep", "1", "-o", "json").stdout)["keep"]) == 1


def test_a_rollout_can_be_read(finished: Shell) -> None:
    shown = finished("show", "starter", "1").stdout
    for part in (
        "fix-add, member 1",
        "reward 1",
        "assistant, turn 2",
        "sed -i 's/a - b/a + b/' calc.py",
        "return a - b",
    ):
        assert part in shown
    assert "$ python3 check_add.py  exit 0" in shown
    assert "\x1b" not in shown


def test_rollout_is_found_by_task_and_member(finished: Shell) -> None:
    assert finished("show", "starter", "fix-add/1").stdout == finished("show", "starter", "1").stdout
    for wrong, said in (
        ("fix-ad/1", "has no task 'fix-ad'. Did you mean 'fix-add'?"),
        ("fix-add/3", "groupSize is 3, so members are 0 to 2"),
        ("fix-add", "is neither TASK/MEMBER nor an index"),
    ):
        answer = finished("show", "starter", wrong)
        assert answer.returncode == 2
        assert said in answer.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["show", "sta"], "starter"),
        (["diff", "starter", "sta"], "starter"),
        (["show", "starter", "fix-add/"], "fix-add/0\nfix-add/1\nfix-add/2"),
        (["run", "job.yaml", "--task", "count"], "count-errors"),
        (["show", "no-such-run", "fix"], ""),
    ],
)
def test_shell_completes_runs_rollouts_and_tasks(finished: Shell, words: list[str], found: str) -> None:
    environ = {
        "_ROLLOUTCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join(["rolloutctl", *words]),
        "COMP_CWORD": str(len(words)),
    }
    program = [str(Path(finished.program[0]).with_name("rolloutctl"))]
    answer = Shell(program, finished.folder).run_interpreter(environ=environ)
    assert answer.stdout.strip().removesuffix(next(iter(finished.folder.glob("out/starter-*"))).name).strip() == found
    assert answer.stderr == ""


def test_runs_are_listed_with_state_and_rewards(finished: Shell) -> None:
    [run] = json.loads(finished("ls", "-o", "json").stdout)
    assert (run["state"], run["sealed"], run["total"], run["masked"]) == ("finished", 6, 6, 0)
    wide, narrow = (finished("ls", environ={"COLUMNS": columns}) for columns in ("120", "50"))
    for table in (wide.stdout, narrow.stdout):
        assert run["folder"] in table
        assert "6 of 6" in table
        assert "0.667 ± 0" in table
    assert "100" not in narrow.stdout
    assert "Not shown in 50 columns: started, pass@1, masked" in narrow.stderr
    assert max(map(len, narrow.stdout.splitlines())) <= 50


def test_two_runs_are_compared_by_task(finished: Shell, tmp_path: Path) -> None:
    job = yaml.safe_load((finished.folder / "job.yaml").read_text())
    job["metadata"]["name"], job["spec"]["groupSize"] = "smaller", 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    shell = Shell(finished.program, tmp_path)
    assert shell("run", "job.yaml", "--task", "fix-add").returncode == 0
    answer = shell("diff", str(finished.folder / "out"), "smaller")
    assert answer.returncode == 0, answer.stderr
    assert "1 task in both runs: 1 better, 0 worse, 0 equal." in answer.stdout
    assert "Mean reward 0.667 → 1: +0.333" in answer.stdout
    assert "spec.groupSize: 3 → 2" in answer.stdout
    found = json.loads(shell("diff", str(finished.folder / "out"), "smaller", "-o", "json").stdout)
    assert found["onlyAfter"] == []
    assert len(found["onlyBefore"]) == 1


def test_comparison_says_that_a_file_of_tasks_has_changed(finished: Shell, tmp_path: Path) -> None:
    job = yaml.safe_load((finished.folder / "job.yaml").read_text())
    job["spec"] |= {"tasks": {"from": {"uri": "rows.jsonl"}}, "agent": {"type": "Nop"}, "groupSize": 1}
    del job["spec"]["model"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    shell = Shell(finished.program, tmp_path)
    for verifier in ("true", "false"):
        row = {"name": "t", "prompt": "Do it.", "verifier": {"commands": [verifier]}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        assert shell("run", "job.yaml", "--new").returncode == 0
    runs = sorted((tmp_path / "out").iterdir())
    assert "tasks: prompts, files or verifiers of tasks with the same names" in shell("diff", *map(str, runs)).stdout
    assert json.loads(shell("diff", str(runs[0]), str(runs[0]), "-o", "json").stdout)["manifest"] == []


def test_part_of_the_tasks_can_be_run(finished: Shell, tmp_path: Path) -> None:
    shutil.copy(finished.folder / "job.yaml", tmp_path)
    shell = Shell(finished.program, tmp_path)
    run = shell("run", "job.yaml", "--task", "fix-*", "--limit", "1", "-o", "json")
    assert json.loads(run.stdout)["total"] == 3, run.stderr
    wrong = shell("run", "job.yaml", "--task", "fix-ad")
    assert wrong.returncode == 2
    assert "--task fix-ad: no task in tasks.inline has that name. Did you mean 'fix-add'?" in wrong.stderr


def test_a_job_is_found_by_name_manifest_folder_and_uri(finished: Shell) -> None:
    (folder,) = (finished.folder / "out").iterdir()
    uri = folder.as_uri()
    names = ["starter", folder.name, "job.yaml", "out", f"out/{folder.name}", str(folder), uri, uri.rsplit("/", 1)[0]]
    answers = {name: finished("results", name) for name in names}
    assert {name: answer.stderr for name, answer in answers.items() if answer.returncode != 0} == {}
    assert len({answer.stdout for answer in answers.values()}) == 1
    assert finished("results").stdout == answers["starter"].stdout


def test_renamed_run_folder_is_still_a_run(finished: Shell, tmp_path: Path) -> None:
    (folder,) = (finished.folder / "out").iterdir()
    shutil.copytree(folder, tmp_path / "kept" / "best")
    for reference in ("kept/best", "kept", f"file://{tmp_path}/kept/best"):
        shown = Shell(finished.program, tmp_path)("results", reference)
        assert shown.returncode == 0, shown.stderr
        assert "6 of 6 rollouts" in shown.stdout
    shutil.copytree(folder, tmp_path / "out" / "best")
    mistyped = Shell(finished.program, tmp_path)("results", "bset")
    assert "Did you mean 'best'?" in mistyped.stderr


def test_run_is_read_and_not_its_older_copy_beside_it(finished: Shell, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "out", tmp_path / "out")
    (folder,) = (tmp_path / "out").iterdir()
    shutil.copytree(folder, folder.with_name(f"{folder.name}-backup"))
    shutil.rmtree(folder.with_name(f"{folder.name}-backup") / "seals")
    for reference in (["starter"], []):
        assert "6 of 6 rollouts" in Shell(finished.program, tmp_path)("results", *reference).stdout


def test_exports_are_json_lines(finished: Shell) -> None:
    for form in ("results", "atif", "openai", "verifiers", "verifiers-traces"):
        lines = finished("export", "starter", "--format", form).stdout.splitlines()
        assert len([json.loads(line) for line in lines]) == 6
        assert finished("export", "starter", "--format", form, "-o", "json").stdout.splitlines() == lines
    assert not (finished.folder / "json").exists(), "-o json asks for a form, as everywhere"
    written = finished("export", "starter", "--format", "openai", "-o", "samples.jsonl")
    assert written.stdout == ""
    conversation = json.loads((finished.folder / "samples.jsonl").read_text().splitlines()[0])["messages"]
    assert [message["role"] for message in conversation][:3] == ["system", "user", "assistant"]


def test_exports_to_a_file_require_a_name_and_report_their_size(finished: Shell) -> None:
    for form, what in (("parquet", "6 rows"), ("verl", "6 rows"), ("harbor", "6 trials")):
        refused = finished("export", "starter", "--format", form)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "with -o" in refused.stderr
        unwritten = finished("export", "starter", "--format", form, "-o", "json")
        assert (unwritten.returncode, unwritten.stdout) == (2, "")
        assert "./json" in unwritten.stderr
        warned = {"PYTHONWARNDEFAULTENCODING": "1"}  # warns of text files without an encoding
        written = finished("export", "starter", "--format", form, "-o", f"{form}.out", environ=warned)
        assert (written.returncode, written.stderr) == (0, f"{what} in {form}.out\n")
        assert (finished.folder / f"{form}.out").exists()
    elsewhere = finished("export", "starter", "--format", "parquet", "-o", "nowhere/run.parquet")
    assert elsewhere.returncode == 2
    assert "nowhere" in elsewhere.stderr


@pytest.mark.parametrize("form", ["tokens", "verl-tokens", "program-atif"])
def test_export_without_content_gives_the_reason_and_keeps_the_existing_file(finished: Shell, form: str) -> None:
    (finished.folder / form).write_text("of an earlier export\n")
    empty = finished("export", "starter", "--format", form, "-o", form)
    assert empty.returncode == 1
    assert "nothing was exported: no rollout" in empty.stderr
    assert (finished.folder / form).read_text() == "of an earlier export\n"


def test_failed_export_keeps_the_existing_file(finished: Shell, tmp_path: Path) -> None:
    (run,) = (finished.folder / "out").iterdir()
    damaged = tmp_path / "out" / run.name
    shutil.copytree(run, damaged)
    (records,) = (damaged / "attempts" / "4" / "0").glob("*-records.jsonl.zst")
    records.write_bytes(b"")
    (tmp_path / "samples.jsonl").write_text("of an earlier export\n")
    failed = Shell(finished.program, tmp_path)("export", "starter", "--format", "openai", "-o", "samples.jsonl")
    assert failed.returncode != 0
    assert (tmp_path / "samples.jsonl").read_text() == "of an earlier export\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "samples.jsonl"]


def test_report_is_one_file_and_its_path_is_printed(finished: Shell) -> None:
    made = finished("report", "starter", "-o", "starter.html")
    assert made.returncode == 0, made.stderr
    assert "starter.html" in made.stderr
    text = (finished.folder / "starter.html").read_text()
    assert text.count('<script type="text/plain" data-group="') == 2
    assert "default-src 'none'" in text, "the file asks for nothing else"
    assert not list(finished.folder.glob(".*.partial"))


@pytest.mark.parametrize("arguments", [("view", "starter"), ("run", "job.yaml", "--view")], ids=["view", "run"])
def test_pages_are_served_until_ctrl_c(finished: Shell, arguments: Sequence[str]) -> None:
    with finished.start(*arguments) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        url = next(re.search(r"http://\S+#/run/starter-\w+", line) for line in lines if "http://" in line)
        assert url is not None
        with urllib.request.urlopen(url[0].partition("#")[0]) as page:
            assert b'<div id="app">' in page.read()
        next(line for line in lines if "Ctrl-C" in line)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in rest


def test_report_prints_its_path_as_json(finished: Shell) -> None:
    told = finished("report", "starter", "-o", "json")
    assert (told.returncode, told.stderr) == (0, "")
    (run,) = (finished.folder / "out").iterdir()
    page = finished.folder / f"{run.name}.html"
    assert json.loads(told.stdout) == {"path": page.name, "bytes": page.stat().st_size}
    assert not (finished.folder / "json").exists()
    assert finished("report", "starter", "-o", "./json").stdout == ""
    assert (finished.folder / "json").read_text().startswith("<!doctype html>")
    (finished.folder / "json").unlink()


def test_closed_pipe_is_not_an_error(finished: Shell) -> None:
    program = " ".join(finished.program)
    piped = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{program} export starter --format atif | head -c 10"],
        cwd=finished.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in piped.stderr
    assert "bug" not in piped.stderr


NOISY_PLUGIN = """
import subprocess

print("printed at import")


class Noisy:
    def after_rollout(self, rollout, result):
        print("printed in a hook")
        subprocess.run(["echo", "printed by a program"])
"""


def test_output_of_user_code_is_not_mixed_into_json(shell: Shell) -> None:
    slow_job(shell.folder, 0, plugins=[{"name": "noisy:Noisy"}])
    (shell.folder / "noisy.py").write_text(NOISY_PLUGIN)
    run = shell("run", "slow.yaml", "-o", "json", environ={"PYTHONPATH": str(shell.folder)})
    assert json.loads(run.stdout)["outcomes"]["Completed"] == 6, run.stderr
    for printed in ("at import", "in a hook", "by a program"):
        assert f"printed {printed}" in run.stderr


# ---------------------------------------------------------------- stopping and going on


def test_stopped_run_resumes(shell: Shell) -> None:
    slow_job(shell.folder, 0.4)
    process = shell.start("run", "slow.yaml")
    wait_for(process, shell.folder, "out/slow-*/seals/*.json")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Resume with: rolloutctl run slow.yaml" in told
    assert "Traceback" not in told
    job_file = next(shell.folder.glob("out/slow-*/job.json"))
    assert json.loads(job_file.read_text())["command"] == f"cd {shell.folder} && rolloutctl run slow.yaml"
    sealed = {path.name: path.read_bytes() for path in shell.folder.glob("out/slow-*/seals/*.json")}
    assert 0 < len(sealed) < 6
    assert f"rolloutctl show {job_file.parent.name} " in told, "an older run of that name may be found by the name"
    again = shell("run", "slow.yaml", "-o", "json")
    assert again.returncode == 0, again.stderr
    assert f"Resuming slow: {len(sealed)} of 6" in again.stderr
    assert json.loads(again.stdout)["outcomes"]["Completed"] == 6
    now = {path.name: path.read_bytes() for path in shell.folder.glob("out/slow-*/seals/*.json")}
    assert {name: now[name] for name in sealed} == sealed, "what was finished stays as it was"


def test_second_interrupt_ends_immediately_and_loses_nothing(shell: Shell) -> None:
    slow_job(shell.folder, 0.4)
    process = shell.start("run", "slow.yaml")
    wait_for(process, shell.folder, "out/slow-*/attempts/1/*/*.zst")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    again = shell("run", "slow.yaml")
    assert again.returncode == 0, again.stderr
    assert "6 of 6 rollouts" in again.stdout


def test_a_changed_manifest_is_refused_and_new_starts_another_run(shell: Shell) -> None:
    slow_job(shell.folder, 0)
    assert shell("run", "slow.yaml").returncode == 0
    slow_job(shell.folder, 0, seed=7)
    refused = shell("run", "slow.yaml")
    assert refused.returncode == 2
    assert "spec.seed: 0 → 7" in refused.stderr
    assert shell("run", "slow.yaml", "--new").returncode == 0
    assert len(list((shell.folder / "out").iterdir())) == 2
    assert shell("gc", "--keep", "1", "--delete").returncode == 0
    assert len(list((shell.folder / "out").iterdir())) == 1
    assert shell("results", "slow").returncode == 0


def test_results_of_an_edited_manifest_name_the_differences(shell: Shell) -> None:
    shell("init")
    assert shell("run", "job.yaml").returncode == 0
    assert "differs" not in shell("results", "job.yaml").stderr
    manifest = shell.folder / "job.yaml"
    manifest.write_text(manifest.read_text().replace("groupSize: 3", "groupSize: 4"))
    told = shell("results", "job.yaml", "-o", "json")
    assert "spec.groupSize: 3 → 4" in told.stderr
    assert len(json.loads(told.stdout)) == 6, "the run's own results, and nothing but JSON"
    assert "differs" not in shell("results", "starter").stderr


def test_failed_start_leaves_no_run_behind(shell: Shell) -> None:
    assert shell("init").returncode == 0
    assert shell("run", "job.yaml").returncode == 0
    failed = shell("run", "job.yaml", "--new", "--provider", "Cluster")
    assert failed.returncode == 1, failed.stderr
    assert len(list((shell.folder / "out").iterdir())) == 1
    assert "6 of 6 rollouts" in shell("results", "job.yaml").stdout


def test_second_run_of_a_live_job_is_refused_and_a_killed_one_is_resumed(shell: Shell) -> None:
    slow_job(shell.folder, 3600, first=0)
    first = shell.start("run", "slow.yaml")
    wait_for(first, shell.folder, "out/slow-*/attempts/0/0/1-1.jsonl.zst")
    second = shell("run", "slow.yaml")
    assert second.returncode == 2
    assert f"is already running (pid {first.pid} on " in second.stderr
    assert "Follow it with: rolloutctl watch slow.yaml" in second.stderr
    assert f"kill -INT {first.pid}" in second.stderr
    assert "--new" in second.stderr
    assert first.poll() is None, "the first run goes on"
    first.kill()
    first.communicate(timeout=60)
    resumed = shell.start("run", "slow.yaml")
    assert resumed.stderr is not None
    assert "Resuming slow" in resumed.stderr.readline()
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=60)


def test_run_and_rollout_are_followed_to_their_ends(shell: Shell) -> None:
    slow_job(shell.folder, 0.3)
    process = shell.start("run", "slow.yaml")
    wait_for(process, shell.folder, "out/slow-*/job.json")
    following = shell.start("logs", "slow", "1")
    watched = shell("watch", "slow", "-o", "json")
    results = [json.loads(line) for line in watched.stdout.splitlines()]
    assert sorted(result["index"] for result in results) == list(range(6)), watched.stderr
    shown, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert shown.count("sed -i 's/a - b/a + b/' calc.py") == 1
    assert "verdict: reward 1" in shown
    process.communicate(timeout=60)
    again = shell("watch", "slow")
    assert "fix-add/1  Finished, reward 1  (2/6, mean 1)" in again.stdout
    assert "is finished" in again.stderr


def test_an_unfinished_rollout_can_be_read(shell: Shell) -> None:
    slow_job(shell.folder, 3600, first=0)
    process = shell.start("run", "slow.yaml")
    wait_for(process, shell.folder, "out/slow-*/attempts/0/0/1-1.jsonl.zst")
    shown = shell("show", "slow", "0")
    [listed] = json.loads(shell("ls", "-o", "json").stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown.returncode == 0, shown.stderr
    assert "fix" in shown.stdout or "calc.py" in shown.stdout
    assert listed["state"] == "running"
    assert json.loads(shell("ls", "-o", "json").stdout)[0]["state"] == "unfinished"


# ---------------------------------------------------------------- mistakes


def test_every_problem_of_a_manifest_is_named_with_its_line(shell: Shell) -> None:
    path = slow_job(shell.folder, 0)
    text = path.read_text().replace("groupSize: 3", "groupSize: 0").replace("maxTurns: 6", "maxTurnz: 6")
    path.write_text(text)
    lines = text.splitlines()
    wrong = shell("validate", "slow.yaml")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    for field, content in (("spec.groupSize", "groupSize: 0"), ("spec.agent.maxTurnz", "maxTurnz: 6")):
        line = next(number for number, found in enumerate(lines, start=1) if content in found)
        assert f"slow.yaml:{line}: {field}: " in wrong.stderr
    assert "maxTurns" in wrong.stderr, "the nearest known name"
    problems = json.loads(shell("validate", "slow.yaml", "-o", "json").stdout)["problems"]
    assert {problem["path"] for problem in problems} == {"spec.groupSize", "spec.agent.maxTurnz"}


BAD_PLUGIN = """
class Curious:
    def after_rollout(self, rollout, result, reward): ...
"""


def test_every_unusable_name_key_and_path_is_reported_at_once(shell: Shell) -> None:
    path = slow_job(shell.folder, 0, tasks={"from": {"uri": "tasks.jsonl"}}, output={"uri": "s3://bucket/runs"})
    job = yaml.safe_load(path.read_text())
    endpoint = {"baseURL": "http://127.0.0.1:9", "name": "m", "apiKeyFrom": {"env": "NO_SUCH_KEY"}}
    job["spec"] |= {
        "agent": {"type": "no_such_module:Agent", "tools": ["bash", "bsh", "finish"]},
        "plugins": [{"name": "curious:Curious"}],
        "model": {"endpoint": endpoint},
    }
    path.write_text(yaml.safe_dump(job))
    (shell.folder / "curious.py").write_text(BAD_PLUGIN)
    (shell.folder / "tasks.jsonl").write_text('{"name": "b"}\n')
    # Credentials and a region, but nothing answers there.
    s3 = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    wrong = shell("validate", path.name, environ={"PYTHONPATH": str(shell.folder)} | s3)
    assert wrong.returncode == 2
    for told in (
        "spec.agent.type: agent 'no_such_module:Agent'",
        "spec.agent.tools[1]: no tool is named 'bsh'",
        "spec.plugins[0]: plugin 'curious:Curious'",
        "reward",
        "NO_SUCH_KEY",
        "spec.output.uri: s3://bucket/runs",
        "tasks.jsonl:1",
    ):
        assert told in wrong.stderr, wrong.stderr
    assert "bug" not in wrong.stderr
    path.write_text(path.read_text().replace("s3://bucket", "ftp://host"))
    assert "spec.output.uri: scheme 'ftp' is unknown" in shell("validate", path.name).stderr.replace(
        "Value error, ", ""
    )


def test_validate_names_tasks_that_script_environments_and_agent_cannot_take(shell: Shell) -> None:
    verifier = {"commands": ["true"]}
    spec = {"mode": "Eval", "output": {"uri": "out"}}
    inline = [{"name": name, "prompt": "Go.", "verifier": verifier} for name in ("one", "two")]
    script = {"tasks": [{"task": "one", "members": [{"turns": [{"content": "Done."}]}]}]}
    stepped = {"name": "in-steps", "prompt": "Go.", "steps": [{"name": "first", "prompt": "Go.", "verifier": verifier}]}
    endpoint = {"endpoint": {"baseURL": "http://127.0.0.1:9/v1", "name": "m"}}
    jobs = [
        (
            {"tasks": {"inline": inline}, "model": {"scripted": script}},
            "spec.model.scripted.tasks: model.scripted has no script for task 'two'; it has one",
        ),
        (
            {
                "tasks": {"environments": [{"id": "FrozenLaek", "groups": 1}]},
                "agent": {"type": "Environment"},
                "model": endpoint,
            },
            "environment 'FrozenLaek' cannot be created",
        ),
        (
            {"tasks": {"inline": [stepped]}, "agent": {"type": "Command", "command": ["true"]}, "model": endpoint},
            "task in-steps: has steps",
        ),
    ]
    for changes, problem in jobs:
        job = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "j"},
            "spec": spec | changes,
        }
        (shell.folder / "job.yaml").write_text(yaml.safe_dump(job))
        validated = shell("validate", "job.yaml")
        assert validated.returncode == 2, validated.stdout
        assert problem in validated.stderr


def test_every_broken_line_of_a_task_file_is_named(shell: Shell) -> None:
    path = slow_job(shell.folder, 0, tasks={"from": {"uri": "tasks.jsonl"}})
    (shell.folder / "tasks.jsonl").write_text('{"name": "a", "prompt": "p"}\n{"name": "b"}\n{"nam\n')
    wrong = shell("validate", path.name)
    assert wrong.returncode == 2
    assert "tasks.jsonl:2" in wrong.stderr
    assert "tasks.jsonl:3" in wrong.stderr
    machine = shell("validate", path.name, "-o", "json")
    assert machine.returncode == 2
    assert [problem["line"] for problem in json.loads(machine.stdout)["problems"]] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "jbo.yaml"], "Did you mean 'job.yaml'?"),
        (["results", "startre"], "Did you mean 'starter'?"),
        (["show", "starter", "99"], "its rollouts are 0 to 5"),
        (["results", "nowhere/at/all"], "no such file or folder"),
        (["results", "ftp://host/x"], "scheme 'ftp' is not known"),
        (["report", "starter", "-o", "missing/report.html"], "missing"),
        (["run", "job.yaml", "--api-key-env", "KEY"], "--model-url"),
        (["gc"], "--older-than-days"),
        (["show", "starter"], "TASK/MEMBER"),
        (["reslts"], "reslts"),
        (["run", "out"], "out: is a folder; expected a manifest file"),
        (["report", "starter", "-o", "/proc/report.html"], "/proc/report.html: no such file or directory"),
        (["export", "starter", "--format", "results", "-o", "/proc/a.jsonl"], "/proc/a.jsonl: no such file or directory"),
        (["run", "job.yaml", "--model-url", "localhost:8000", "--model-name", "m"], '--model-url: "localhost:8000"'),
        (["run", "job.yaml", "--output", "ftp://host/x"], "--output: scheme 'ftp' is unknown; use s3://"),
        (["run", "job.yaml", "--new", "--model-url", "http://h/v1", "--model-name", "m", "--api-key-env", "NO_SUCH_KEY"],
         "environment variable NO_SUCH_KEY is missing or empty; set it"),
        (["run", "job.yaml", "--provider", "Docker"], "'--provider': 'Docker' is not one of 'local', 'container'"),
        (["--log-level", "yaml", "ls"], "'--log-level': 'yaml' is not one of 'debug', 'info'"),
        (["results", "starter", "-o", "yaml"], "'-o': 'yaml' is not one of 'text', 'json'"),
        (["run", "job.yaml", "--limit", "0"], "'--limit': Input should be greater than or equal to 1"),
        (["show", "starter", "fix-add"], "'fix-add' is neither TASK/MEMBER nor an index"),
        (["diff", "starter", "startre"], "only of starter. Did you mean 'starter'?"),
        (["proxy", "--model", "m"], "give --endpoint URL, or --relay"),
        (["init", "--output", "x"], "--output"),
    ],
)  # fmt: skip
def test_mistake_is_reported_in_a_sentence(finished: Shell, arguments: list[str], said: str) -> None:
    answer = finished(*arguments)
    assert answer.returncode in (2, 4)
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize(
    ("command", "options"), [("proxy", ["--model", "m", "--relay", "--keyless"]), ("serve", ["stream.yaml"])]
)
def test_port_that_is_in_use_is_named(shell: Shell, command: str, options: list[str]) -> None:
    slow_job(shell.folder, 0, tasks={"stream": {}}).rename(shell.folder / "stream.yaml")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        answer = shell(command, *options, "--port", port, environ={"HARBOR_SERVER_KEY": "k" * 32})
    assert answer.returncode == 2, answer.stderr
    assert f"cannot listen on 127.0.0.1:{port}: another program uses this port" in answer.stderr
    assert "--port" in answer.stderr


def test_modules_beside_the_manifest_are_found_from_any_folder(shell: Shell) -> None:
    (shell.folder / "jobs").mkdir()
    path = slow_job(shell.folder / "jobs", 0)
    job = yaml.safe_load(path.read_text())
    path.write_text(path.read_text().replace("type: ToolCalling", "type: own_agent_1:Mine"))
    assert job["spec"]["agent"]["type"] == "ToolCalling"
    module = path.with_name("own_agent_1.py")
    module.write_text("class Mine:\n    async def run(self, context):\n        return context.task.name\n")
    assert shell("validate", "jobs/slow.yaml", "--offline").returncode == 0
    module.write_text("import json\n\nraise RuntimeError('no licence')\n")
    wrong = shell("validate", "jobs/slow.yaml", "--offline")
    assert f"importing own_agent_1 failed in {module}:3 with RuntimeError: no licence" in wrong.stderr
    module.write_text("Other = 1\n")
    assert f"module own_agent_1 ({module}) has no 'Mine'" in shell("run", "jobs/slow.yaml").stderr


def test_unreachable_model_is_reported_before_anything_runs(shell: Shell) -> None:
    slow_job(shell.folder, 0)
    answer = shell("run", "slow.yaml", "--model-url", "http://127.0.0.1:9/v1", "--model-name", "m")
    assert answer.returncode == 1
    assert "127.0.0.1:9" in answer.stderr
    assert "spec.model.endpoint.baseURL (--model-url)" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not list(shell.folder.glob("out/slow-*"))


class DyingModel(BaseHTTPRequestHandler):
    """Answers the check, and fails afterwards."""

    answered = 0

    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        DyingModel.answered += 1
        if DyingModel.answered > 1:
            self.send_error(503, "weights are gone")
            return
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
        body = json.dumps({"choices": [choice], "model": "m"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.timeout(300)  # it reads until the message comes
def test_model_server_that_dies_is_shown_while_the_calls_are_retried(shell: Shell) -> None:
    slow_job(shell.folder, 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), DyingModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        process = shell.start("run", "slow.yaml", "--model-url", url, "--model-name", "m")
        assert process.stderr is not None
        shown = next((line for line in process.stderr if "failed and is retried" in line), "")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        server.shutdown()
    assert "503" in shown


@pytest.mark.parametrize(
    "answers", [0, pytest.param(1, marks=pytest.mark.full)], ids=["before the first rollout", "after the check"]
)
def test_model_server_that_never_answers_is_shown_with_its_url(shell: Shell, answers: int) -> None:
    slow_job(shell.folder, 0)
    ended = threading.Event()

    class SilentModel(DyingModel):
        """Accepts every call, and answers only the first ones."""

        left = answers

        def do_POST(self) -> None:
            if not SilentModel.left:
                ended.wait()
                return
            SilentModel.left -= 1
            DyingModel.answered = 0
            super().do_POST()

    with ThreadingHTTPServer(("127.0.0.1", 0), SilentModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        process = shell.start("run", "slow.yaml", "--model-url", url, "--model-name", "m")
        assert process.stderr is not None
        shown = next((line for line in process.stderr if "waited for" in line), "")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=45)  # less than the model has for the check
        ended.set()
        server.shutdown()
    assert process.returncode == 130
    assert url in shown
    assert "no call has been answered yet" in shown


def test_debug_shows_the_origin_of_an_error(finished: Shell) -> None:
    answer = finished("--debug", "results", "startre")
    assert answer.returncode == 2
    assert "Traceback" in answer.stderr


def test_log_level_selects_messages_and_stdout_has_only_the_answer(finished: Shell) -> None:
    loud = finished("--log-level", "debug", "results", "-o", "json")
    quiet = finished("results", "-o", "json")
    assert "DEBUG asyncio" in loud.stderr
    assert "DEBUG" not in quiet.stderr
    assert loud.stdout == quiet.stdout


def test_damaged_records_are_a_storage_error_that_names_the_object(shell: Shell) -> None:
    slow_job(shell.folder, 0)
    assert shell("run", "slow.yaml").returncode == 0
    seal = next(shell.folder.glob("out/slow-*/seals/2.json"))
    seal.write_text('{"version": 1')
    answer = shell("results", "slow")
    assert answer.returncode == 4
    assert "seals/2.json" in answer.stderr


def test_damaged_run_is_listed_with_the_object(finished: Shell, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "out", tmp_path / "out")
    (run,) = (tmp_path / "out").iterdir()
    (run / "stats.json").write_text('{"a')
    listed = Shell(finished.program, tmp_path)("ls")
    assert listed.returncode == 0
    assert "damaged" in listed.stdout
    assert f"{run.name} is damaged: stats.json: it is not JSON" in listed.stderr


def test_run_with_a_damaged_job_file_is_listed_with_the_file(finished: Shell, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "out", tmp_path / "out")
    (run,) = (tmp_path / "out").iterdir()
    (run / "job.json").write_text('{"a')
    shell = Shell(finished.program, tmp_path)
    listed = shell("ls", "out")
    assert listed.returncode == 0
    assert f"{run.name} is damaged: {run.name}/job.json: Invalid JSON" in listed.stderr
    assert "Restore this file from a copy" in listed.stderr
    assert "contains no run" not in listed.stderr
    assert [row["state"] for row in json.loads(shell("ls", "starter", "-o", "json").stdout)] == ["damaged"]


def test_truncated_records_are_named_by_every_command_that_reads_them(shell: Shell) -> None:
    slow_job(shell.folder, 0)
    assert shell("run", "slow.yaml").returncode == 0
    (records,) = shell.folder.glob("out/slow-*/attempts/2/0/*-records.jsonl.zst")
    assert_truncation_is_reported(
        shell, records, ["show", "slow", "2"], ["report", "slow"], ["export", "slow", "--format", "openai"]
    )
    assert len(list(shell.folder.glob("*.html*"))) == 1, "the other rollouts can be read, so there is a report of them"


def test_truncated_segment_of_an_unfinished_rollout_is_named_by_every_command_that_reads_it(shell: Shell) -> None:
    slow_job(shell.folder, 3600, first=0)
    process = shell.start("run", "slow.yaml")
    wait_for(process, shell.folder, "out/slow-*/attempts/0/0/1-1.jsonl.zst")
    process.kill()
    process.communicate(timeout=60)
    (segment,) = shell.folder.glob("out/slow-*/attempts/0/0/1-1.jsonl.zst")
    assert_truncation_is_reported(shell, segment, ["show", "slow", "0"], ["run", "slow.yaml"])


def assert_truncation_is_reported(shell: Shell, file: Path, *reading: list[str]) -> None:
    file.write_bytes(file.read_bytes()[:-5])
    for arguments in reading:
        answer = shell(*arguments)
        assert answer.returncode == 4, (arguments, answer)
        assert "/".join(file.parts[-4:]) in answer.stderr, arguments
        assert "Traceback" not in answer.stderr


def test_commands_that_find_no_run_create_no_folder(shell: Shell) -> None:
    assert shell("results").returncode == 2
    assert shell("results", (shell.folder / "nowhere").as_uri()).returncode == 2
    assert shell("gc", "nowhere", "--keep", "1").returncode == 2
    assert list(shell.folder.iterdir()) == []


def test_check_fails_when_a_task_is_not_sound(shell: Shell) -> None:
    path = slow_job(shell.folder, 0)
    job = yaml.safe_load(path.read_text())
    job["spec"]["tasks"]["inline"][0]["solution"] = ["true"]
    job["spec"]["tasks"]["inline"][1]["verifier"]["commands"] = ["true"]
    path.write_text(yaml.safe_dump(job))
    checked = shell("check", "slow.yaml", "-o", "json")
    assert checked.returncode == 1
    rows = json.loads(checked.stdout)
    assert [row["ok"] for row in rows] == [False, True, True, False]
    assert "AssertionError" in rows[0]["output"], "what the verifier printed"


# ---------------------------------------------------------------- terminals


def test_help_of_every_command_lists_its_exit_codes(finished: Shell) -> None:
    for command in ("run", "check", "validate", "results", "show", "report", "export", "gc", "init"):
        text = " ".join(finished(command, "--help").stdout.split())
        assert "130 interrupted" in text, command


def test_a_terminal_that_knows_only_ascii_gets_no_traceback(finished: Shell) -> None:
    for arguments in (["results", "starter"], ["show", "starter", "1"], ["run", "job.yaml"]):
        answer = finished.run_interpreter(
            *arguments, environ={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
        )
        assert answer.returncode == 0, answer.stderr


def on_a_terminal(shell: Shell, *arguments: str, environ: Mapping[str, str]) -> str:
    """Return what is written to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*shell.program, *arguments],
        cwd=shell.folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | dict(environ),
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed: Linux reports it as an error
            break
        if not part:
            break
        sent += part
    os.close(ours)
    assert process.wait(60) == 0
    return sent.decode()


def test_a_terminal_gets_a_live_bar_and_its_cursor_back(shell: Shell) -> None:
    slow_job(shell.folder, 0.2)
    sent = on_a_terminal(shell, "run", "slow.yaml", environ={})
    assert "\x1b[?25l" in sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")
    assert "6/6 rollouts" in sent
    assert "left" in sent


def test_no_color_is_honoured(finished: Shell) -> None:
    plain = on_a_terminal(finished, "results", "starter", environ={"NO_COLOR": "1"})
    assert "starter" in plain
    assert not any(f"\x1b[{code}m" in plain for code in range(30, 50))


OWN_CODE = """
from agent_rollouts import tool


@tool
async def lookup(command: str) -> str:
    \"\"\"Look up.\"\"\"
    raise KeyError("no such word")


class Failing:
    def after_rollout(self, rollout, result):
        raise ValueError("no such field")
"""


def test_tracebacks_of_tools_and_plugins_are_in_the_terminal_and_in_show(shell: Shell) -> None:
    path = slow_job(shell.folder, 0, plugins=[{"name": "own_code_1:Failing"}])
    job = yaml.safe_load(path.read_text())
    job["spec"]["agent"]["tools"] = ["own_code_1:lookup", "finish"]
    job["spec"]["tasks"]["inline"][1].pop("verifier")
    path.write_text(yaml.safe_dump(job).replace("name: bash", "name: lookup"))
    (shell.folder / "own_code_1.py").write_text(OWN_CODE)
    run = shell("run", "slow.yaml")
    shown = shell("show", "slow", "fix-add/0").stdout
    for raised in ('raise KeyError("no such word")', 'raise ValueError("no such field")'):
        assert run.stderr.count(raised) == 1
        assert raised in shown
    assert f"First error: {shell.folder}/own_code_1.py:8: KeyError" in run.stdout
    assert "1 of 2 tasks has no verifier, so rollouts get no reward: count-errors" in run.stderr
    assert "No reward: the task has no verifier" in shell("show", "slow", "count-errors/0").stdout
    assert run.stderr.count("Isolation: ") == 1
    assert "Warning: PATH" not in run.stderr


def test_run_shows_a_traceback_once_and_fails_when_the_agents_own_code_raised(shell: Shell) -> None:
    """A typing error in an agent's code must not become reward 0 with exit code 0."""
    (shell.folder / "typo.py").write_text(
        "class Typo:\n    async def run(self, context):\n        return context.task.prompt.uper()\n"
    )
    job = slow_job(shell.folder, 0)
    document = yaml.safe_load(job.read_text())
    document["spec"]["agent"] = {"type": "typo:Typo"}
    job.write_text(yaml.safe_dump(document))
    ran = shell("run", str(job), environ={"PYTHONPATH": str(shell.folder)})
    assert ran.returncode == 1, ran.stderr
    said = ran.stdout + ran.stderr
    assert said.count("context.task.prompt.uper()") == 1
    raised = "AttributeError: 'str' object has no attribute 'uper'"
    assert f"raised in 6 of 6 rollouts (AgentError): {raised}" in said
    assert ran.stderr.index("context.task.prompt.uper()") < ran.stderr.index("raised in 6 of 6")
    assert "context.task.prompt.uper()" in shell("show", "slow", "0").stdout


def test_run_whose_agent_always_raises_stops_and_continues_with_corrected_code(shell: Shell) -> None:
    typo = shell.folder / "typo.py"
    typo.write_text("class Typo:\n    async def run(self, context):\n        return context.task.prompt.uper()\n")
    job = slow_job(shell.folder, 0, groupSize=8, runners={"concurrency": 16})
    document = yaml.safe_load(job.read_text())
    document["spec"]["agent"] = {"type": "typo:Typo"}
    job.write_text(yaml.safe_dump(document))
    environ = {"PYTHONPATH": str(shell.folder)}
    broken = shell("run", str(job), environ=environ)
    assert broken.returncode == 130
    assert "raised the same exception in each of the first 8 rollouts" in broken.stderr
    assert broken.stderr.count("context.task.prompt.uper()") == 2, "at once, and where the run ends"
    error = "rollouts, so the run was stopped: "
    listed = json.loads(shell("ls", "-o", "json").stdout)[0]
    assert (listed["sealed"], error in listed["error"]) == (0, True)
    assert f"{error}AttributeError: 'str' object has no attribute 'uper'" in shell("ls").stderr
    assert "context.task.prompt.uper()" in shell("results", "slow").stderr
    assert "context.task.prompt.uper()" in shell("show", "slow", "0").stdout
    typo.write_text(typo.read_text().replace("uper", "upper"))
    resumed = json.loads(shell("run", str(job), "-o", "json", environ=environ).stdout)
    assert resumed["outcomes"]["Completed"] == resumed["total"] == 16
    assert resumed["tracebacks"] == {}


def test_validate_pulls_no_image_when_offline(shell: Shell) -> None:
    path = slow_job(shell.folder, 0, sandbox={"image": "127.0.0.1:9/none:1", "provider": "Local"})
    checked = shell("validate", path.name, "--offline")
    assert checked.returncode == 0, checked.stderr
    assert "was not checked" in checked.stderr
    assert shell("validate", path.name).returncode != 0


def test_validate_calls_the_model_unless_offline(shell: Shell) -> None:
    path = slow_job(shell.folder, 0)
    job = yaml.safe_load(path.read_text())
    job["spec"]["model"] = {"endpoint": {"baseURL": "http://127.0.0.1:9/v1", "name": "m"}}
    path.write_text(yaml.safe_dump(job))
    wrong = shell("validate", path.name)
    assert wrong.returncode == 2
    assert "spec.model: Unreachable" in wrong.stderr
    assert "use `rolloutctl validate --offline`" in wrong.stderr
    assert shell("validate", path.name, "--offline").returncode == 0

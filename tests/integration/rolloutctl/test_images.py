"""`rolloutctl images` with a real builder, and trials as Harbor has them."""

import json
import subprocess
from pathlib import Path

import jsonschema

from tests.support.harbor_tasks import hello_world, in_two_steps
from tests.support.preloaded import run_rolloutctl

# Harbor 0.25's own models as JSON Schema, reduced to the parts that our trials contain. Unknown names are refused, as by
# Harbor. The package itself needs Python 3.12.
HARBOR = json.loads((Path(__file__).parents[2] / "support/harbor_trial_schema.json").read_text())
HARBOR_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "result.json": ("TrialResult", {"verifier_environment_mode": "alone"}),
    "config.json": ("TrialConfig", {"trial_folder": "no name of theirs"}),
    "lock.json": ("TrialLock", {"task": {"type": "local"}}),
}
"""Harbor's model of each file, and a change that the model must refuse."""
JOB = """\
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: demo}
spec:
  mode: Eval
  tasks: {from: {uri: tasks, format: Harbor}, imageTemplate: './images/{name}-{digest}'}
  agent: {type: Oracle}
  output: {uri: out}
"""


def rolloutctl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_rolloutctl(*arguments, folder=cwd)


def harbors(model: str) -> jsonschema.Draft202012Validator:
    """Return the validator of a trial's file."""
    schema = {"$ref": f"#/$defs/{model}", "$defs": HARBOR["$defs"]}
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


def test_a_missing_image_is_built_once_and_kept_as_a_layout(tmp_path: Path) -> None:
    dockerfile: dict[str, str | bytes] = {
        "environment/Dockerfile": "FROM nowhere.example/base:1\nCOPY data /app/data\nWORKDIR /app\n",
        "environment/data": "x",
    }
    hello_world(tmp_path / "tasks" / "hello", **dockerfile)
    (tmp_path / "job.yaml").write_text(JOB)
    build = ("images", "job.yaml", "--base", "nowhere.example/base:1=scratch", "-o", "json")
    first = rolloutctl(*build, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (built,) = json.loads(first.stdout)
    assert built["state"] == "built"
    layout = tmp_path / built["image"]
    assert [path for path in (layout.parent).iterdir() if path.name.startswith(".")] == []
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert (layout / "blobs" / manifest["digest"].replace(":", "/")).is_file()
    (again,) = json.loads(rolloutctl(*build, cwd=tmp_path).stdout)
    assert again["state"] == "exists"


def test_failed_build_leaves_nothing_and_quotes_the_builder(tmp_path: Path) -> None:
    dockerfile: dict[str, str | bytes] = {"environment/Dockerfile": "FROM scratch\nCOPY missing /\n"}
    hello_world(tmp_path / "tasks" / "hello", **dockerfile)
    (tmp_path / "job.yaml").write_text(JOB)
    failed = rolloutctl("images", "job.yaml", cwd=tmp_path)
    assert failed.returncode == 1
    assert "missing" in failed.stderr
    assert not (tmp_path / "images").exists()


def test_trials_are_written_in_harbors_layout(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    in_two_steps(tmp_path / "tasks" / "two")
    sick = '[environment.healthcheck]\ncommand = "false"\nretries = 1\n'
    hello_world(tmp_path / "tasks" / "unhealthy", sick)
    job = JOB.replace("./images/{name}-{digest}", "agent-rollouts-quickstart:latest")
    (tmp_path / "job.yaml").write_text(f"{job}  attempts: {{limit: 1}}\n")
    ran = rolloutctl("run", "job.yaml", cwd=tmp_path)
    assert (ran.returncode, "1 InfraFailed" in ran.stderr) == (1, True), ran.stderr
    (run,) = (tmp_path / "out").iterdir()
    exported = rolloutctl("export", str(run), "--format", "harbor", "-o", "trials", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    hello, two = tmp_path / "trials" / "hello__0", tmp_path / "trials" / "two__1"
    result = json.loads((hello / "result.json").read_text())
    unhealthy = tmp_path / "trials" / "unhealthy__2"
    assert json.loads((unhealthy / "result.json").read_text())["exception_info"]["exception_type"] == "SetupFailed"
    for file, (model, wrong) in HARBOR_MODELS.items():
        for trial in (hello, two, unhealthy):
            written = json.loads((trial / file).read_text())
            harbors(model).validate(written)
            assert not harbors(model).is_valid({**written, **wrong})
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert (result["task_name"], result["verifier_environment_mode"]) == ("hello", "shared")
    assert (hello / "verifier" / "reward.txt").read_text() == "1\n"
    assert json.loads((two / "steps/double/verifier/reward.json").read_text()) == {"reward": 0.5, "style": 1.0}
    assert [step["step_name"] for step in json.loads((two / "result.json").read_text())["step_results"]] == [
        "write",
        "double",
    ]
    again = rolloutctl("export", str(run), "--format", "harbor", "-o", "trials", cwd=tmp_path)
    assert again.returncode == 2, again.stderr
    assert "exists already" in again.stderr

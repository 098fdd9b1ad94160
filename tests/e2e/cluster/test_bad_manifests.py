"""A wrong manifest is refused by `kubectl apply` itself, before anything starts, and `rolloutctl validate` says the same."""

import copy
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutctl.commands.check import validate
from rolloutctl.errors import CommandError
from rolloutctl.ui.console import Form
from tests.support.cluster import Cluster, Job, Object, eventually

GOOD: Object = yaml.safe_load("""
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: bad}
spec:
  groupSize: 2
  tasks:
    inline:
      - name: task
        prompt: Do it.
        files: [{path: given, content: x}]
        verifier: {commands: ["true"]}
  model: {endpoint: {baseURL: "http://model.test/v1", name: m}}
  sandbox: {image: busybox}
  output: {uri: "s3://bucket/runs"}
  suspend: true
""")

# What kubectl says when a rule is broken, and what rolloutctl says.
RULES = {
    "required": ("Required value", "is missing"),
    "known": ("unknown field", "is not a known field"),
    "type": ("must be of type", "expected (text|a list|a mapping|a whole number|true or false)"),
    "one of": ("Unsupported value", "is not allowed, expected"),
    "form": ("should match", "does not have the expected form"),
    "at least": ("greater than or equal to|at least", "expected at least"),
    "more than": ("greater than", "expected more than"),
    "at most": ("less than or equal to|may not be more than", "expected at most"),
    "unique": ("Duplicate value", "twice|names must differ"),
    "exactly one": ("exactly one of|one and only one schema", "exactly one of"),
    "groupSize": ("is more than groupSize", "more than groupSize"),
    "a model": ("model is needed for this agent", "model is needed for agent"),
    "a parser": ("is missing: this agent calls tools", "is missing: agent ToolCalling calls tools"),
    "a report": ("report is needed for kind junit", "report is needed for kind junit"),
    "named tests": ("tests can be named for kinds pytest and junit only",) * 2,
}

MISSING = object()
TASK = "spec.tasks.inline[0]"
ENDPOINT = "spec.model.endpoint"
# (what is set, to which value, the rule that this breaks), and the field that is to be named where it is another one.
BAD: list[tuple[str, Any, str] | tuple[str, Any, str, str]] = [
    ("metadata.name", "first.job", "form"),
    ("metadata.name", "x" * 53, "at most"),
    ("spec", MISSING, "required"),
    ("spec.mode", "Test", "one of"),
    ("spec.seed", -1, "at least"),
    ("spec.seed", 2**53 + 1, "at most"),
    ("spec.seed", "7", "type"),
    ("spec.seed", 1.5, "type"),
    ("spec.groupSize", 0, "at least"),
    ("spec.groupSize", 1025, "at most"),
    ("spec.groupSize", "2", "type"),
    ("spec.groupsize", 2, "known"),
    ("spec.maxTurns", 9, "known"),
    ("spec.tasks", MISSING, "required"),
    ("spec.tasks", {}, "exactly one"),
    ("spec.tasks.stream", {}, "exactly one", "spec.tasks"),
    ("spec.tasks", {"stream": {"maxInFlight": 0}}, "at least", "spec.tasks.stream.maxInFlight"),
    ("spec.tasks", {"from": {"uri": ""}}, "at least", "spec.tasks.from.uri"),
    ("spec.tasks", {"from": {"uri": "s3://b/t", "format": "Csv"}}, "one of", "spec.tasks.from.format"),
    ("spec.tasks", {"from": {"uri": "s3://b/t", "limit": 0}}, "at least", "spec.tasks.from.limit"),
    ("spec.tasks.inline", [], "at least"),
    ("spec.tasks.inline", {}, "type"),
    ("spec.tasks.inline[1]", GOOD["spec"]["tasks"]["inline"][0], "unique", "spec.tasks.inline"),
    (f"{TASK}.name", MISSING, "required"),
    (f"{TASK}.name", "my task", "form"),
    (f"{TASK}.name", "x" * 201, "at most"),
    (f"{TASK}.prompt", MISSING, "required"),
    (f"{TASK}.prompt", "", "at least"),
    (f"{TASK}.prompt", "  ", "form"),
    (f"{TASK}.files[0].path", MISSING, "required"),
    (f"{TASK}.files[0].path", "", "at least"),
    (f"{TASK}.files[0].mode", 644, "type"),
    (f"{TASK}.files[0].mode", "rwx", "form"),
    (f"{TASK}.files[0].content", MISSING, "exactly one", f"{TASK}.files[0]"),
    (f"{TASK}.files[0].contentBase64", "eA==", "exactly one", f"{TASK}.files[0]"),
    (f"{TASK}.files[1]", {"path": "given", "content": "other"}, "unique", f"{TASK}.files"),
    (f"{TASK}.verifier.commands", MISSING, "required"),
    (f"{TASK}.verifier.commands", [], "at least"),
    (f"{TASK}.verifier.commands", "true", "type"),
    (f"{TASK}.verifier.kind", "Pytest", "one of"),
    (f"{TASK}.verifier.kind", "junit", "a report", f"{TASK}.verifier"),
    (f"{TASK}.verifier.report", "report.xml", "a report", f"{TASK}.verifier"),
    (f"{TASK}.verifier.tests", ["test_a"], "named tests", f"{TASK}.verifier"),
    (f"{TASK}.timeouts.agentSeconds", 0, "at least"),
    (f"{TASK}.timeouts.commandSeconds", 604_801, "at most"),
    (f"{TASK}.timeouts.setupSeconds", "5m", "type"),
    (f"{TASK}.sandbox.workingDir", "here", "form"),
    (f"{TASK}.sandbox.podTemplate", {}, "known"),
    ("spec.model", MISSING, "a model", "spec"),
    ("spec.model", {}, "exactly one"),
    ("spec.model.serverRef", "server", "exactly one", "spec.model"),
    ("spec.model", {"function": "no-module"}, "form", "spec.model.function"),
    ("spec.model", {"scripted": {"tasks": []}}, "at least", "spec.model.scripted.tasks"),
    (
        "spec.model",
        {"scripted": {"tasks": [{"task": "task", "members": [{"turns": []}]}]}},
        "at least",
        "spec.model.scripted.tasks[0].members[0].turns",
    ),
    (
        "spec.model",
        {"server": {"model": {"name": "m"}, "engine": {"image": "vllm", "version": "0.27.0"}}},
        "a parser",
        "model.server.toolCallParser",
    ),
    (f"{ENDPOINT}.baseURL", MISSING, "required"),
    (f"{ENDPOINT}.baseURL", "model.test/v1", "form"),
    (f"{ENDPOINT}.name", "", "at least"),
    (f"{ENDPOINT}.api", "openai", "one of"),
    (f"{ENDPOINT}.callSeconds", 0, "at least"),
    (f"{ENDPOINT}.apiKey", "sk-1", "known"),
    (f"{ENDPOINT}.apiKeyFrom", {}, "exactly one"),
    (f"{ENDPOINT}.apiKeyFrom", {"env": "K", "secretKeyRef": {"name": "s", "key": "k"}}, "exactly one"),
    (f"{ENDPOINT}.apiKeyFrom", {"secretKeyRef": {"name": "s"}}, "required", f"{ENDPOINT}.apiKeyFrom.secretKeyRef.key"),
    (f"{ENDPOINT}.apiKeyFrom.env", "API-KEY", "form"),
    ("spec.sampling.temperature", 11, "at most"),
    ("spec.sampling.topP", 0, "more than"),
    ("spec.sampling.maxTokens", 0, "at least"),
    ("spec.sampling.stop", "END", "type"),
    ("spec.agent.type", "my agent", "form"),
    ("spec.agent.tools", ["ba sh"], "form", "spec.agent.tools[0]"),
    ("spec.agent.maxTurns", 0, "at least"),
    ("spec.agent.tokenBudget", 0, "at least"),
    ("spec.agent.maxFormatErrors", 1001, "at most"),
    ("spec.sandbox.image", "", "at least"),
    ("spec.sandbox.workingDir", "workspace", "form"),
    ("spec.sandbox.user", 1000, "type"),
    ("spec.sandbox.user", "some body", "form"),
    ("spec.sandbox.env", [{"name": "A-B", "value": "x"}], "form", "spec.sandbox.env[0].name"),
    ("spec.sandbox.env", [{"name": "A", "value": 1}], "type", "spec.sandbox.env[0].value"),
    ("spec.sandbox.env", [{"name": "A"}, {"name": "A"}], "unique"),
    ("spec.sandbox.resources.cpu", 1, "type"),
    ("spec.sandbox.resources.memory", "512 MB", "form"),
    ("spec.sandbox.resources.processes", 0, "at least"),
    ("spec.sandbox.resources.gpu", 1, "known"),
    ("spec.sandbox.network", "None", "type"),
    ("spec.sandbox.network.agent", [], "at least"),
    ("spec.sandbox.startSeconds", 0, "at least"),
    ("spec.sandbox.lifetimeSeconds", 604_801, "at most"),
    ("spec.sandbox.runtimeClassName", "g_visor", "form"),
    ("spec.sandbox.podTemplate", [], "type"),
    ("spec.sandbox.workspaces.mode", "overlay", "one of"),
    ("spec.sandbox.workspaces.perSandbox", 0, "at least"),
    ("spec.sandbox.provider", "Docker", "one of"),
    ("spec.verifier.mode", "shared", "one of"),
    ("spec.verifier.artifacts", [], "at least"),
    ("spec.verifier.artifactsLimit", "a lot", "form"),
    ("spec.verifier.reward", "Mean", "one of"),
    ("spec.attempts.limit", 0, "at least"),
    ("spec.attempts.backoffSeconds", -1, "at least"),
    ("spec.completion.minCompletedPerGroup", 3, "groupSize", "completion.minCompletedPerGroup"),
    ("spec.completion.maxInfraFailureFraction", 1.5, "at most"),
    ("spec.completion.cancelStragglers", "yes", "type"),
    ("spec.runners.replicas", 257, "at most"),
    ("spec.runners.concurrency", 0, "at least"),
    ("spec.runners.serviceAccountName", "Me", "form"),
    ("spec.output", MISSING, "required"),
    ("spec.output.uri", MISSING, "required"),
    ("spec.output.uri", "", "at least"),
    ("spec.output.secretRef", "my_secret", "form"),
    ("spec.security", "Root", "one of"),
    ("spec.suspend", "true", "type"),
    ("spec.ttlSecondsAfterFinished", -2, "at least"),
]


def changed(where: str, value: Any) -> Object:
    """Return the valid manifest with one field set or removed."""
    manifest = copy.deepcopy(GOOD)
    at: Any = manifest
    *parents, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", where)]
    for part in parents:
        at = at[part] if isinstance(part, int) else at.setdefault(part, {})
    if value is MISSING:
        del at[last]
    elif isinstance(last, int):
        at.insert(last, value)
    else:
        at[last] = value
    return manifest


@pytest.fixture(scope="module")
def shared_namespace(cluster: Cluster) -> Iterator[str]:
    """One namespace for all tests, because none of them creates an object."""
    name = f"bad-manifests-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def one_of_each_rule() -> Iterator[Any]:
    """Return all of BAD in `make test-full`, and one manifest for each rule in `make test`."""
    seen = set()
    for bad in BAD:
        marks = [pytest.mark.full] if bad[2] in seen else []
        seen.add(bad[2])
        yield pytest.param(bad, id=f"{bad[0]}: {bad[2]}", marks=marks)


@pytest.mark.parametrize("bad", list(one_of_each_rule()))
def test_kubectl_and_rolloutctl_name_the_same_field_and_rule(
    cluster: Cluster, shared_namespace: str, tmp_path: Path, bad: tuple[str, Any, str, str]
) -> None:
    where, value, rule, *named = bad
    (field,) = named or [where]
    text = yaml.safe_dump(changed(where, value))
    applied = cluster.kubectl("apply", "-n", shared_namespace, "-f", "-", text=text, check=False)
    assert applied.returncode != 0
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(CommandError) as refused:
        validate(tmp_path / "job.yaml", offline=True, form=Form.TEXT)
    for said, words in zip((applied.stderr, refused.value.message), RULES[rule], strict=True):
        assert re.search(rf"(?<![\w.]){re.escape(field)}(?!\.?\w)", said), said
        assert re.search(words, said), said
    # Each manifest has exactly one error, and only that is reported.
    assert len(refused.value.message.splitlines()) == 1


def test_refused_manifest_is_refused_for_its_error(cluster: Cluster, shared_namespace: str) -> None:
    assert len(BAD) >= 60
    cluster.kubectl("apply", "-n", shared_namespace, "--dry-run=server", "-f", "-", text=yaml.safe_dump(GOOD))
    assert not cluster.list("rolloutjobs", shared_namespace)


def test_command_line_reports_all_errors_with_their_lines(cluster: Cluster, tmp_path: Path) -> None:
    text = (
        "apiVersion: rollout.dev/v1alpha1\nkind: RolloutJob\nmetadata: {name: bad}\nspec:\n  groupSize: 0\n"
        "  output: {uri: 7}\n  tasks: {stream: {}}\n"
    )
    path = tmp_path / "job.yaml"
    path.write_text(text)
    done = cluster.rolloutctl("validate", str(path))
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"{path}:5: spec.groupSize: is 0, expected at least 1" in said
    assert f"{path}:6: spec.output.uri: is the number 7, expected text" in said


BEYOND_THE_SCHEMA: list[tuple[Object, str]] = [
    (changed("spec.output.uri", "./out"), "spec.output.uri: './out' is a local folder, which runner pods do not share"),
    (
        changed("spec.sandbox.podTemplate", {"spec": {"hostNetwork": True}}),
        "spec.sandbox.podTemplate.spec.hostNetwork: ",
    ),
    (
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "ModelServer",
            "metadata": {"name": "server"},
            "spec": {
                "model": {"name": "m"},
                "engine": {"image": "vllm", "version": "0.27.0"},
                "podTemplate": {"spec": {"hostNetwork": True}},
            },
        },
        "spec.podTemplate.spec.hostNetwork: is refused: it grants rights on the node",
    ),
    (
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {"name": "bad"},
            "spec": {"image": "busybox", "security": "Privileged"},
        },
        "spec.security: Privileged is not allowed in namespace ",
    ),
]


@pytest.mark.parametrize(("manifest", "words"), BEYOND_THE_SCHEMA, ids=lambda it: it if isinstance(it, str) else "")
def test_error_beyond_the_schema_is_reported_at_apply_too(
    cluster: Cluster, shared_namespace: str, manifest: Object, words: str
) -> None:
    text = yaml.safe_dump(manifest)
    applied = cluster.kubectl("apply", "-n", shared_namespace, "-f", "-", text=text, check=False)
    assert applied.returncode != 0
    assert "denied the request" in applied.stderr
    assert words in applied.stderr


def test_an_invalid_object_can_still_be_labelled_resumed_and_deleted(cluster: Cluster, unasked_namespace: str) -> None:
    manifest, words = BEYOND_THE_SCHEMA[0]
    job = Job(cluster, unasked_namespace, copy.deepcopy(manifest))
    job.apply()
    invalid = eventually(lambda: job.condition("Invalid") or None, 60, job.describe)
    assert words in invalid["message"]
    cluster.kubectl("label", "namespace", unasked_namespace, "rollout.dev/admission-")
    cluster.kubectl("label", "rolloutjob", job.name, "-n", unasked_namespace, "team=a")
    patch = '{"spec": {"suspend": false}}'
    cluster.kubectl("patch", "rolloutjob", job.name, "-n", unasked_namespace, "--type=merge", "-p", patch)
    cluster.kubectl("delete", "rolloutjob", job.name, "-n", unasked_namespace, "--timeout=60s")

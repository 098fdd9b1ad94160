"""The definitions, judged by the API server's own code: structural rules, the cost limits of CEL, and objects.

Needs Go; the program is built once into the user's cache folder.
"""

import copy
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rollout_api.cluster import shard_name
from rollout_api.crd import FOLDER
from rollout_api.manifest import validate
from rollout_api.model_server import ModelServer

SOURCE = Path(__file__).parent / "apiserver_rules"
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "job.yaml"
JOB: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
SANDBOX: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "Sandbox",
    "metadata": {"name": "s"},
    "spec": {
        "image": "python:3.12",
        "network": {"agent": ["example.com:443"]},
        "user": None,
        "podTemplate": {"spec": {}},
    },
}
MODEL_SERVERS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((Path(__file__).parents[2] / "unit/rollout_operator/model_server/specs").glob("*.yaml"))
}
KINDS = {
    "RolloutJob": "rolloutjobs.yaml",
    "RolloutShard": "rolloutshards.yaml",
    "Sandbox": "sandboxes.yaml",
    "SandboxPool": "sandboxpools.yaml",
    "ModelServer": "modelservers.yaml",
}


NO_PARSER = {"model": {"name": "m"}, "engine": {"image": "vllm", "version": "0.27.0"}}


def model_server(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    head = {"apiVersion": "rollout.dev/v1alpha1", "kind": "ModelServer", "metadata": {"name": "m"}}
    return head | {"spec": {**copy.deepcopy(spec), **changes}}


@functools.cache
def program() -> Path:
    sources = b"".join((SOURCE / name).read_bytes() for name in ("go.mod", "go.sum", "main.go"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agent-rollouts"
    built = cache / f"apiserver-rules-{hashlib.sha256(sources).hexdigest()[:12]}" / "apiserver_rules"
    if not built.exists():
        beside = built.with_name(f"building-{os.getpid()}")
        command = ["go", "build", "-trimpath", "-o", str(beside), "."]
        subprocess.run(command, cwd=SOURCE, check=True, env=os.environ | {"CGO_ENABLED": "0"})
        beside.rename(built)
    return built


def ask(folder: Path, *objects: tuple[dict[str, Any], dict[str, Any] | None]) -> dict[str, Any]:
    requests = [{"definition": KINDS[new["kind"]], "object": new, "old": old} for new, old in objects]
    done = subprocess.run(
        [program(), *sorted(folder.glob("*.yaml"))],
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def errors(new: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    return ask(FOLDER, (new, old))["objects"][0]  # type: ignore[no-any-return]


def changed(whole: dict[str, Any], change: Callable[..., Any]) -> dict[str, Any]:
    new = copy.deepcopy(whole)
    change(new["spec"])
    return new


def test_an_api_server_accepts_the_definitions() -> None:
    assert ask(FOLDER)["definitions"] == {name: [] for name in KINDS.values()}


def a_rule_for_files(spec: dict[str, Any]) -> None:
    """Add a rule that is too costly. This is why the union of a file is a oneOf and not a rule."""
    file = spec["tasks"]["properties"]["inline"]["items"]["properties"]["files"]["items"]
    file["x-kubernetes-validations"] = [{"rule": "has(self.content) != has(self.contentBase64)", "message": "one"}]


def a_rule_about_nothing(spec: dict[str, Any]) -> None:
    spec["agent"]["x-kubernetes-validations"] = [{"rule": "self.noSuchField == 1", "message": "x"}]


def a_field_without_type(spec: dict[str, Any]) -> None:
    del spec["sandbox"]["properties"]["user"]["type"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (a_rule_for_files, "exceeds budget"),
        (a_rule_about_nothing, "undefined field 'noSuchField'"),
        (a_field_without_type, "properties[user].type: Required value"),
    ],
)
def test_the_rules_checker_refuses_what_an_api_server_refuses(
    damage: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    definition = yaml.safe_load((FOLDER / "rolloutjobs.yaml").read_text())
    damage(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
    (tmp_path / "rolloutjobs.yaml").write_text(yaml.safe_dump(definition))
    assert message in "\n".join(ask(tmp_path)["definitions"]["rolloutjobs.yaml"])


def test_the_quickstart_and_a_sandbox_are_accepted() -> None:
    assert errors(JOB) == []
    assert errors(SANDBOX) == []
    for spec in MODEL_SERVERS.values():
        assert errors(model_server(spec)) == []
        own = {"toolCallParser": "hermes"} | spec
        assert errors(changed(JOB, lambda job, own=own: job.update(model={"server": own}))) == []


@pytest.mark.parametrize("agent", [{"type": "ReAct"}, {"tools": []}, {"type": "Nop"}, {"type": "mine:Agent"}])
def test_an_agent_that_calls_no_tools_of_the_servers_needs_no_parser(agent: dict[str, Any]) -> None:
    assert errors(changed(JOB, lambda job: job.update(model={"server": NO_PARSER}, agent=agent))) == []


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "two task sources": (
        lambda spec: spec["tasks"].update(stream={}),
        "exactly one of inline, from, stream, environments, branch",
    ),
    "no task source": (lambda spec: spec.update(tasks={}), "exactly one of inline, from, stream, envi"),
    "routed experts of a scripted model": (
        lambda spec: spec["model"].update(routedExperts={}),
        "routedExperts is allowed only with server, serverRef",
    ),
    "two models": (lambda spec: spec["model"].update(serverRef="x"), "exactly one of endpoint, serverRef"),
    "no model": (lambda spec: spec.pop("model"), "model is needed for this agent"),
    "too many to complete": (
        lambda spec: spec.update(completion={"minCompletedPerGroup": 5}),
        "completion.minCompletedPerGroup is more than groupSize",
    ),
    "two tasks of one name": (
        lambda spec: spec["tasks"]["inline"].append(spec["tasks"]["inline"][0]),
        "Duplicate value",
    ),
    "two plugins of one name": (
        lambda spec: spec.update(plugins=[{"name": "SafetyFilter"}, {"name": "SafetyFilter", "config": {"x": 1}}]),
        "Duplicate value",
    ),
    "two contents": (
        lambda spec: spec["tasks"]["inline"][0]["files"][0].update(contentBase64="eA=="),
        "must validate one and only one schema",
    ),
    "junit without report": (
        lambda spec: spec["tasks"]["inline"][0]["verifier"].update(kind="junit"),
        "report is needed for kind junit",
    ),
    "named tests of commands": (
        lambda spec: spec["tasks"]["inline"][0]["verifier"].update(kind="commands", tests=["a"]),
        "tests can be named for kinds pytest and junit only",
    ),
    "results of commands": (
        lambda spec: spec["tasks"]["inline"][0]["verifier"].update(kind="commands", alsoPassed=["XFail"]),
        "alsoPassed is for kinds pytest and junit only",
    ),
    "a program without a command": (
        lambda spec: spec.update(agent={"type": "Command"}),
        "command is needed for type Command, and for no other type",
    ),
    "a command of another agent": (
        lambda spec: spec.update(agent={"command": ["a"]}),
        "command is needed for type Command, and for no other type",
    ),
    "an install of another agent": (
        lambda spec: spec.update(agent={"install": ["a"]}),
        "install is allowed only for type Command",
    ),
    "a command of an agent of the catalog": (
        lambda spec: spec.update(agent={"type": "Codex", "command": ["codex"]}),
        "command is needed for type Command, and for no other type",
    ),
    "a system prompt of a program": (
        lambda spec: spec.update(agent={"type": "Codex", "systemPrompt": "Be good."}),
        "agent.systemPrompt is not allowed for an agent that is a program",
    ),
    "no parser for an agent that calls tools": (
        lambda spec: spec.update(model={"server": NO_PARSER}),
        "model.server.toolCallParser is missing: this agent calls tools; set it, such as hermes",
    ),
    "no parser for the tools of a server of tools": (
        lambda spec: spec.update(
            model={"server": NO_PARSER},
            agent={"type": "SWE", "tools": [], "mcpServers": [{"name": "files", "command": ["files"]}]},
        ),
        "model.server.toolCallParser is missing",
    ),
    "no parser for an environment's tool": (
        lambda spec: spec.update(
            model={"server": NO_PARSER}, agent={"tools": []}, tasks={"environments": [{"id": "Sokoban"}]}
        ),
        "model.server.toolCallParser is missing",
    ),
    "a stored setup in Plain": (
        lambda spec: spec["sandbox"].update(storeSetup=True, workspaces={"mode": "Plain"}),
        "storeSetup needs workspaces in Overlay",
    ),
    "an unknown network": (lambda spec: spec["sandbox"].update(network={"agent": "All"}), "should match"),
    "an empty allow-list": (lambda spec: spec["sandbox"].update(network={"agent": []}), "at least 1"),
    "an unknown field": (lambda spec: spec.update(groupsize=1), "spec.groupsize: unknown field"),
    "a number for text": (lambda spec: spec["sandbox"].update(user=1000), "must be of type string"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_job_is_refused_with_a_reason(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    assert message in "\n".join(errors(changed(JOB, change)))


def test_null_is_the_same_as_a_missing_field() -> None:
    def nulls(spec: dict[str, Any]) -> None:
        spec["tasks"]["stream"] = spec["tasks"]["from"] = spec["model"]["endpoint"] = None
        spec["tasks"]["inline"][0]["files"][0]["contentBase64"] = None
        spec["sandbox"].update(user=None, image=None, resources={"memory": None})
        spec["seed"] = None

    assert errors(changed(JOB, nulls)) == []


def test_the_spec_of_a_job_and_of_a_sandbox_cannot_be_changed() -> None:
    assert errors(JOB, copy.deepcopy(JOB)) == []
    assert errors(JOB | {"status": {"sealed": 3}}, copy.deepcopy(JOB)) == []
    for change in (
        lambda spec: spec.update(runners={"replicas": 2}),
        lambda spec: spec.update(attempts={"limit": 5}),
        lambda spec: spec["sandbox"].update(user="nobody"),
    ):
        assert "cannot be changed" in "\n".join(errors(changed(JOB, change), JOB))
    assert "cannot be changed" in "\n".join(errors(changed(SANDBOX, lambda spec: spec.pop("image")), SANDBOX))


def test_sandbox_is_parked_only_where_its_storage_is_named_at_its_creation() -> None:
    parking = {"uri": "s3://bucket/prefix"}
    parked = lambda spec: spec.update(running=False)  # noqa: E731
    parkable = changed(SANDBOX, lambda spec: spec.update(parking=parking))
    assert errors(changed(parkable, parked), parkable) == errors(parkable, changed(parkable, parked)) == []
    assert "false needs parking" in "\n".join(errors(changed(SANDBOX, parked), SANDBOX))
    assert "cannot be changed" in "\n".join(errors(parkable, SANDBOX))


def test_the_shards_of_a_job_with_the_longest_name_take_reports() -> None:
    metadata = {"name": shard_name("j" * 52, "5f0c2c1e-0000", 255), "namespace": "team"}
    shard = {"apiVersion": JOB["apiVersion"], "kind": "RolloutShard", "metadata": metadata}
    assert errors(shard) == []
    assert errors(shard | {"status": {"index": 255, "state": "Running", "sealed": 3}}) == []
    assert errors(shard | {"status": {"index": 255, "state": "Fine"}})


def test_the_report_of_a_completed_shard_keeps_its_state() -> None:
    shard = {"apiVersion": JOB["apiVersion"], "kind": "RolloutShard", "metadata": {"name": "s", "namespace": "team"}}
    completed = shard | {"status": {"index": 0, "state": "Completed", "sealed": 8}}
    assert errors(completed, shard | {"status": {"index": 0, "state": "Running", "sealed": 7}}) == []
    assert (
        errors(shard | {"status": {"index": 0, "state": "Completed", "sealed": 8, "message": "lost"}}, completed) == []
    )
    for late in ("Running", "Draining"):
        stale = shard | {"status": {"index": 0, "state": late, "sealed": 3}}
        assert "this shard is completed" in "\n".join(errors(stale, completed))


def test_two_conditions_of_one_type_are_refused() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Up", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    twice = {"conditions": [ready, ready]}
    assert "Duplicate value" in "\n".join(errors(JOB | {"status": twice}))


SMALL = MODEL_SERVERS["smallest"]
SGLANG = MODEL_SERVERS["sglang"]["engine"]
REFUSED_SERVERS: dict[str, tuple[dict[str, Any], str]] = {
    "more accelerators than ways": ({"accelerator": {"count": 4}}, "accelerator.count must equal tensor"),
    "nodes that do not divide": ({"parallelism": {"tensor": 4, "nodes": 3}}, "nodes does not divide"),
    "an engine that is too old": ({"engine": SMALL["engine"] | {"version": "0.9.1"}}, "expected 0.14 or newer"),
    "an update of an old engine": (
        {"engine": SMALL["engine"] | {"version": "0.25.0"}, "policy": {"version": 1, "uri": "s3://p/1"}},
        "policy updates and asleep need engine.version 0.27",
    ),
    "an SGLang that is too old": ({"engine": SGLANG | {"version": "0.5.9"}}, "expected 0.5.23 or newer"),
    "an SGLang to which weights are pushed": (
        {"engine": SGLANG, "weightTransfer": {"mode": "Push", "push": {"hook": "http://t"}}},
        "weightTransfer.mode Push is refused: SGLang",
    ),
    "an SGLang with adapters in two copies": (
        {"engine": SGLANG, "adapters": {"red": {}}, "lora": {"maxAdapters": 2}, "parallelism": {"data": 2}},
        "parallelism.data must be 1 with adapters",
    ),
    "a flag of SGLang": ({"engine": SGLANG, "extraArgs": ["--tp_size=2"]}, "spec.extraArgs"),
    "a version without a version": ({"engine": SMALL["engine"] | {"version": "latest"}}, "should match"),
    "a rank that vLLM lacks": ({"lora": {"maxRank": 24}}, "Unsupported value"),
    "an adapter without lora": ({"adapters": {"red": {"version": 0}}}, "lora is needed for adapters"),
    "an adapter beside another policy": (
        {"adapters": {"red": {}}, "lora": {}, "policy": {"version": 1, "uri": "s3://p/1"}},
        "adapters need weightTransfer.mode Pull and policy.version 0",
    ),
    "an adapter on CPUs": (
        {"adapters": {"red": {}}, "lora": {}, "accelerator": {"count": 0}},
        "adapters need accelerators",
    ),
    "more adapters than slots": (
        {"adapters": {"red": {}, "blue": {}}, "lora": {"maxAdapters": 2}},
        "one more than adapters",
    ),
    "an adapter from nowhere": ({"adapters": {"red": {"version": 1}}, "lora": {}}, "uri"),
    "an adapter with a name that is no name": ({"adapters": {"Red@1": {}}, "lora": {}}, "adapters"),
    "an adapter with the name of the model": (
        {"model": {"name": "red"}, "adapters": {"red": {}}, "lora": {}},
        "name of the model",
    ),
    "a policy from nowhere": ({"policy": {"version": 1}}, "policy.uri is needed for mode Pull"),
    "a push to nobody": ({"weightTransfer": {"mode": "Push"}}, "push is needed for mode Push"),
    "a push in mode Pull": ({"weightTransfer": {"push": {"hook": "http://t"}}}, "push is needed for mode Push"),
    "a cache of two kinds": ({"cache": {"claimName": "a", "size": "1Gi"}}, "exactly one of claimName, size"),
    "another port": ({"extraArgs": ["--port", "80"]}, "spec.extraArgs"),
    "another port, with an underscore": ({"extraArgs": ["--served_model_name=x"]}, "spec.extraArgs"),
    "a variable twice": ({"env": [{"name": "A"}, {"name": "A"}]}, "Duplicate value"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED_SERVERS.values(), ids=REFUSED_SERVERS)
def test_a_wrong_model_server_is_refused_by_the_api_server_and_by_the_model(
    change: dict[str, Any], message: str
) -> None:
    assert message in "\n".join(errors(model_server(SMALL, **change)))
    with pytest.raises(ValidationError):
        validate(ModelServer, model_server(SMALL, **change))


@pytest.mark.parametrize("name", ["7b-chat", "qwen-api"])
def test_model_server_with_a_name_that_no_service_can_have_is_refused(name: str) -> None:
    server = model_server(SMALL)
    server["metadata"]["name"] = name
    assert "must begin with a letter and not end in -api" in "\n".join(errors(server))


def test_policy_version_cannot_decrease_and_its_source_is_fixed() -> None:
    before = model_server(SMALL, policy={"version": 3, "uri": "s3://p/3"})
    told = {
        '{"version": 2, "uri": "s3://p/3"}': "cannot decrease",
        '{"version": 3, "uri": "s3://p/other"}': "raise policy.version",
        '{"version": 3, "uri": "s3://p/3", "digest": "sha256:%s"}' % ("0" * 64): "raise policy.version",
    }
    for policy, message in told.items():
        assert message in "\n".join(errors(model_server(SMALL, policy=json.loads(policy)), before))
    assert "cannot decrease" in "\n".join(errors(model_server(SMALL), before)), "leaving it out means version 0"
    for allowed in ({"version": 4, "uri": "s3://p/4"}, {"version": 3, "uri": "s3://p/3", "minReady": 1}):
        assert errors(model_server(SMALL, policy=allowed), before) == []


def test_model_and_parallelism_of_a_model_server_cannot_be_changed() -> None:
    before = model_server(SMALL)
    for change in (
        {"model": {"name": "other"}},
        {"cache": {"size": "1Gi"}},
        {"parallelism": {"tensor": 2, "nodes": 2}},
    ):
        assert "cannot be changed; create another ModelServer" in "\n".join(
            errors(model_server(SMALL, **change), before)
        )
    assert errors(model_server(SMALL, replicas=9, toolCallParser="hermes"), before) == []

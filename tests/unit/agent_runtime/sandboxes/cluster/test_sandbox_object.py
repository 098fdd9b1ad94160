"""The Sandbox that a runner creates, and which tasks may share one."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.base import WorkspaceSpec
from agent_runtime.sandboxes.cluster.sandbox_object import (
    found_kind,
    kind_of,
    new_name,
    places_of,
    sandbox_object,
    sandbox_spec,
)
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import Resources, Sandbox

SPEC = WorkspaceSpec(group="g0", working_dir="/workspace", image="task", network={"setup": "Public"})


def job(mode: str = "Auto", name: str = "sums", **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": name, "namespace": "team", "uid": "0b5e"},
            "spec": {
                "tasks": {"inline": [{"name": "one", "prompt": "add"}]},
                "agent": {"type": "Nop"},
                "sandbox": {"workspaces": {"mode": mode}, "podTemplate": {"metadata": {"labels": {"a": "b"}}}},
                "output": {"uri": "s3://bucket/x"},
                **spec,
            },
        }
    )


def test_the_object_is_a_valid_sandbox_owned_by_its_job_with_no_template_of_its_own() -> None:
    asked = sandbox_object(job(), 3, "sums-3-0123abcd", sandbox_spec(job(), SPEC))
    read = Sandbox.model_validate(asked)
    assert read.spec.pod_template is None
    assert read.metadata.labels["rollout.dev/runner"] == "3"
    (owner,) = asked["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("0b5e", True, False)


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, image="another"),
        replace(SPEC, resources=Resources(memory="1Gi")),
        replace(SPEC, network={"setup": "None"}),
        replace(SPEC, network={"setup": "Public", "agent": ["pypi.example:443"]}),
    ],
)
def test_tasks_that_need_different_pods_never_share_one(other: WorkspaceSpec) -> None:
    assert kind_of(sandbox_spec(job(), other)) != kind_of(sandbox_spec(job(), SPEC))


def test_tasks_that_differ_only_in_workspace_settings_share_a_sandbox() -> None:
    other = replace(SPEC, group="g1", working_dir="/src", env={"A": "b"}, setup=["make"])
    assert kind_of(sandbox_spec(job(), other)) == kind_of(sandbox_spec(job(), SPEC))


def test_only_where_workspaces_have_users_of_their_own_do_different_users_share_one() -> None:
    other = replace(SPEC, user="1000")
    assert kind_of(sandbox_spec(job("Overlay"), other)) == kind_of(sandbox_spec(job("Overlay"), SPEC))
    for mode in ("Auto", "Plain"):
        assert kind_of(sandbox_spec(job(mode), other)) != kind_of(sandbox_spec(job(mode), SPEC))


def test_sandbox_is_recognized_after_the_api_server_added_defaults() -> None:
    spec = sandbox_spec(job(), SPEC)
    defaulted = {"whenFinished": "Delete", "security": "Standard", "env": [], **spec.wire()}
    assert found_kind(defaulted) == kind_of(spec)
    assert found_kind({"image": 3}) is None


@given(st.integers(1, 64), st.integers(1, 64), st.none() | st.integers(1, 64))
def test_a_sandbox_asks_for_no_more_places_than_its_runner_can_fill(
    concurrency: int, size: int, per_sandbox: int | None
) -> None:
    one = job(groupSize=size, runners={"concurrency": concurrency}, sandbox={"workspaces": {"perSandbox": per_sandbox}})
    assert places_of(one) == min(concurrency, per_sandbox or size)


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", fullmatch=True), st.integers(0, 255))
def test_names_are_valid_and_never_the_same(name: str, runner: int) -> None:
    names = {new_name(name, runner) for _ in range(8)}
    assert len(names) == 8
    assert all(len(one) <= 52 and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one) for one in names)

"""Services that a cluster cannot run, because their base image differs from that of their task."""

from typing import Any

import pytest

from agent_runtime.engine.opening import about_bases
from rollout_api.rollout_job import RolloutJob


def job(dockerfile: str | None, *services: str | None, **dockerfiles: Any) -> RolloutJob:
    task: dict[str, Any] = {"name": "t", "prompt": "p", "solution": ["true"], "services": []}
    if dockerfile is not None:
        task["dockerfile"] = {"text": dockerfile}
    for number, text in enumerate(services):
        built = {} if text is None else {"dockerfile": {"text": text}}
        task["services"].append({"name": f"s{number}", "command": ["run"], **built})
    spec = {
        "mode": "Eval",
        "tasks": {"inline": [task], "dockerfiles": dockerfiles},
        "sandbox": {"image": "debian:12"},
        "agent": {"type": "Oracle"},
        "output": {"uri": "out"},
    }
    return RolloutJob.model_validate(
        {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "j"}, "spec": spec}
    )


def told(job: RolloutJob) -> str:
    return "; ".join(map(str, about_bases(job, job.spec.tasks.inline or [])))


@pytest.mark.parametrize("own", [None, "FROM debian:12\nRUN true\n", "FROM debian:12 AS a\nFROM a\n"])
def test_service_with_another_base_image_is_named(own: str | None) -> None:
    found = told(job(own, None, "ARG V=16\nFROM postgres:$V\n", "FROM debian:12\nRUN apt-get install redis\n"))
    assert "s1 of t (postgres:16, not debian:12)" in found
    assert "s0" not in found
    assert "s2" not in found


def test_bases_of_the_job_count_as_the_images_that_replace_others() -> None:
    assert told(job(None, "FROM postgres:16\n", bases={"postgres:16": "debian:12"})) == ""
    assert "s0 of t (mine:1, not debian:12)" in told(job(None, "FROM debian:12\n", bases={"debian:12": "mine:1"}))

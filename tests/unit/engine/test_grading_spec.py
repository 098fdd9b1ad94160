"""The workspace in which a rollout is graded: the task's prepared state, in the verifier's image if it has one."""

import pytest

from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.context import grading_spec, workspace_spec
from rollout_api.tasks import Task, Tasks
from tests.support.records import small_job


@pytest.mark.parametrize("agent", [{"type": "Pi"}, {"type": "Command", "command": ["a"], "install": ["get a"]}])
def test_program_agent_is_not_installed_in_the_image_of_the_verifier(agent: dict[str, object]) -> None:
    job = small_job()
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"agent": type(job.spec.agent)(**agent)})})
    verifier: dict[str, object] = {"commands": ["true"]}

    def spec(verifier: dict[str, object]) -> tuple[str | None, list[str], list[str]]:
        task = Task.model_validate({"name": "t", "prompt": "p", "setup": ["make"], "verifier": verifier})
        own = workspace_spec(job, Rollout.of(job, 0, 0, task))
        graded = grading_spec(own, task)
        return graded.image, list(own.setup), list(graded.setup)

    _, setup, graded = spec(verifier)
    assert setup == graded, "the prepared state is shared"
    assert len(setup) == 2
    assert spec({**verifier, "image": "tests:1"}) == ("tests:1", setup, ["make"])


def test_what_only_a_data_set_lists_must_have_a_public_address() -> None:
    job = small_job()
    listed = {"network": {"agent": ["own.internal:80"]}}
    sandbox = job.spec.sandbox.model_validate({**job.spec.sandbox.wire(), **listed})
    network = {"agent": ["own.internal:80", "other.internal:80"], "verifier": ["x:1"]}
    task = Task.model_validate({"name": "t", "prompt": "p", "sandbox": {"network": network}})

    def reached(tasks: dict[str, object]) -> object:
        spec = job.spec.model_copy(update={"sandbox": sandbox, "tasks": Tasks.model_validate(tasks)})
        own = job.model_copy(update={"spec": spec})
        return workspace_spec(own, Rollout.of(own, 0, 0, task)).network

    assert reached({"inline": [task.wire()]}) == {"setup": "None", **network}
    of_others = {"setup": "None", "agent": ["own.internal:80", "public:other.internal:80"], "verifier": ["public:x:1"]}
    assert reached({"from": {"uri": "t.jsonl"}}) == of_others
    assert reached({"stream": {}}) == of_others

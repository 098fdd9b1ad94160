"""Settings of a job's tasks."""

from rollout_api.tasks import Task, Tasks, TaskSource

GIVEN = {
    "from": {"uri": "tasks"},
    "imageTemplate": "images/{name}",
    "runnerEnvironments": ["my:Game"],
    "folderImages": ["./image"],
}


def test_settings_stay_with_another_source_and_are_valid() -> None:
    given = Tasks.model_validate(GIVEN)
    moved = given.moved_to(from_=TaskSource(uri="other"))
    assert Tasks.model_validate(moved.wire()) == moved
    assert moved == given.model_copy(update={"from_": TaskSource(uri="other")})
    listed = given.moved_to(inline=[Task(name="t", prompt="p")])
    assert Tasks.model_validate(listed.wire()) == listed
    assert (listed.runner_environments, listed.folder_images) == (["my:Game"], ["./image"])


def test_environments_of_the_manifest_stay_its_own() -> None:
    given = Tasks.model_validate(
        {"environments": [{"id": "my:Game", "groups": 1}], "dockerfiles": {"args": {"A": "1"}}}
    )
    moved = given.moved_to(from_=TaskSource(uri="other"))
    assert (moved.environments, moved.own_environments, moved.dockerfiles) == (None, {"my:Game"}, given.dockerfiles)

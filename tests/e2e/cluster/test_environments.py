"""Untrusted environments in sandbox pods: their rewards, and the outcome of one that hangs."""

from collections.abc import Callable

import pytest

from tests.support.cluster import QUICKSTART_IMAGE, REPOSITORY, Job, Object
from tests.support.scripted import scripted_job

# What the model answers in each environment, turn by turn.
ANSWERS = {"played": ["go", "go", "end"], "hanging": ["go", "hang"]}


@pytest.mark.full
def test_environment_in_a_sandbox_pod_works_and_a_hanging_one_is_graded(new_job: Callable[[Object], Job]) -> None:
    """The game is only in the task's files, so no runner could open it."""
    game = (REPOSITORY / "tests/support/games.py").read_text()
    tasks: list[Object] = [
        {
            "name": name,
            "prompt": "{observation}",
            "files": [{"path": "games.py", "content": game}],
            "timeouts": {"commandSeconds": 5},
            "environment": {"id": "games:Game", "maxSteps": 9, "runIn": "Sandbox"},
        }
        for name in ANSWERS
    ]
    manifest = scripted_job("games", tasks, {}, groupSize=1, agent={"type": "Environment"}, attempts={"limit": 1})
    manifest["spec"]["sandbox"] = {"image": QUICKSTART_IMAGE}
    manifest["spec"]["completion"] = {"maxInfraFailureFraction": 1}
    for script, answers in zip(manifest["spec"]["model"]["scripted"]["tasks"], ANSWERS.values(), strict=True):
        script["members"] = [{"turns": [{"content": f"<answer>{answer}</answer>"} for answer in answers]}]
    job = new_job(manifest).apply()
    job.wait("Succeeded")
    played, hanging = job.results()
    assert (played["outcome"], played["reward"], played["turns"]) == ("Completed", 3, 3)
    # Not masked, because a policy could then escape a bad episode by an action that hangs. Repeated, because it may be
    # chance.
    assert (hanging["outcome"], hanging["stopReason"], hanging["reward"]) == ("Completed", "ResourceLimit", 1)
    assert [failed["reason"] for failed in hanging["failedAttempts"]] == ["EnvironmentHung"]

"""A failed pull says why and what to do."""

from agent_runtime.sandboxes.images.store import pull_problem

LOG = r'time="2026-01-01T00:00:00Z" level=fatal msg="pinging registry: Get \"https://h/v2/\": no such host"'


def test_log_of_a_failed_pull_becomes_a_sentence_with_the_remedy() -> None:
    assert pull_problem("python:3", LOG).startswith(
        'pinging registry: Get "https://h/v2/": no such host; check its name'
    )
    assert pull_problem("task.tar", LOG).endswith("an archive is a path, so write ./task.tar")
    assert pull_problem("python:3", "no space left\n").startswith("no space left; ")

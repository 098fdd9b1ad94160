"""Jobs whose model follows a script: the tool calls of each member, and a delay before each turn."""

from collections.abc import Mapping, Sequence

from tests.support.cluster import QUICKSTART_IMAGE, Object

STEPS = 6
"""Turns of a `careful` member before it finishes."""


def turn(command: str, *, think: float = 0) -> Object:
    """Return a tool call, after this many seconds."""
    return {"delaySeconds": think, "toolCalls": [{"name": "bash", "arguments": {"command": command}}]}


def finish(*, think: float = 0) -> Object:
    """Return the agent's own end."""
    return {"delaySeconds": think, "toolCalls": [{"name": "finish", "arguments": {"message": "Done."}}]}


def careful(think: float) -> Sequence[Object]:
    """Return a member that writes a line in each turn, which shows lost and repeated calls."""
    return [*(turn(f"echo {step} >> steps", think=think) for step in range(STEPS)), finish(think=think)]


def task(name: str, **fields: object) -> Object:
    """Return a task whose reward is 1 if each step of a `careful` member was taken once, in order."""
    wanted = " ".join(map(str, range(STEPS)))
    check = f'test "$(cat steps | xargs)" = "{wanted}"'
    return {"name": name, "prompt": "Take every step once.", "verifier": {"commands": [check]}, **fields}


def scripted_job(name: str, tasks: Sequence[Object], members: Mapping[str, Sequence[Object]], **spec: object) -> Object:
    """Return a RolloutJob. `members`: the turns of each member of a group, in order, by a descriptive name."""
    script = [{"turns": list(turns)} for turns in members.values()]
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Eval",
            "groupSize": len(script),
            "agent": {"tools": ["bash", "finish"], "maxTurns": STEPS + 2},
            "sandbox": {"image": QUICKSTART_IMAGE, "workingDir": "/workspace", "workspaces": {"mode": "Overlay"}},
            "attempts": {"backoffSeconds": 0.2},
            "tasks": {"inline": list(tasks)},
            "model": {"scripted": {"tasks": [{"task": task["name"], "members": script} for task in tasks]}},
            **spec,
        },
    }

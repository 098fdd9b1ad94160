"""The engine's events as log lines."""

import logging
from collections.abc import Iterator
from typing import Any

from agent_runtime.engine.events import (
    AttemptFailed,
    Event,
    GroupFinished,
    JobEnded,
    JobStarted,
    PluginFailed,
    RolloutSealed,
)
from agent_runtime.runner.log import log

Line = tuple[int, str, dict[str, Any]]


def log_event(event: Event) -> None:
    """Log a notable event, but no group that an earlier process finished."""
    if isinstance(event, GroupFinished) and event.earlier:
        return
    for level, message, fields in lines_of(event):
        log.log(level, message, extra={"fields": fields})


def lines_of(event: Event) -> Iterator[Line]:
    """Yield level, message and fields: groups at info, single rollouts at debug, failures at warning."""
    match event:
        case JobStarted():
            verb = "resumes" if event.resumed else "starts"
            total = "an open stream of" if event.total is None else event.total
            yield (
                logging.INFO,
                f"{verb} its shard of {event.name}: {total} rollouts",
                {"sealed": event.sealed, "uri": event.uri},
            )
            for warning in (*event.warnings, *event.isolation):
                yield logging.WARNING, warning, {}
        case RolloutSealed(result=result):
            yield (
                logging.DEBUG,
                f"rollout {result.index} of {result.task} is sealed",
                {"rollout": result.index, "outcome": result.outcome.value, "reward": result.reward},
            )
        case GroupFinished():
            outcomes = [result.outcome.value for result in event.results]
            rewards = [result.reward for result in event.results]
            yield (
                logging.INFO,
                f"group {event.group} ({event.task}) is finished",
                {"group": event.group, "outcomes": outcomes, "rewards": rewards},
            )
        case AttemptFailed():
            follows = "another attempt follows" if event.retry else "it was the last attempt"
            yield (
                logging.WARNING,
                f"rollout {event.index}: attempt {event.attempt} was lost to infrastructure, {follows}",
                {"rollout": event.index, "reason": event.reason, "why": event.message},
            )
        case PluginFailed():
            yield (
                logging.WARNING,
                f"plugin {event.plugin} failed in {event.hook}",
                {"plugin": event.plugin, "key": event.key, "why": event.message}
                | ({"traceback": event.traceback} if event.traceback else {}),
            )
        case JobEnded(summary=summary):
            fields: dict[str, Any] = {"outcomes": dict(summary.outcomes), "meanReward": summary.mean_reward}
            if summary.aborted is not None:
                yield logging.ERROR, f"the job is aborted: {summary.aborted}", fields
            elif summary.completed:
                yield logging.INFO, "the shard is completed", fields
            else:
                yield logging.INFO, "stopped; the rest can be resumed", fields

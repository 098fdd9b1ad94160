"""What the pages show of a whole run, from its table of rollouts."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_runtime.recording.overview import Overview
from agent_runtime.recording.reader import DamagedRun, RunFolder
from agent_runtime.statistics import mean, pass_at_k, standard_error
from rollout_api.model import Prices
from rolloutctl.run_state import state_of_overview
from rolloutctl.viewer.rollout import visible
from rolloutctl.viewer.table import RolloutTable

BINS: Final = 11
"""Of the histogram: 0, 0.1 … 1, because rewards are mostly fractions of a few tests."""
MOST_CAUSES: Final = 50
RATE_SECONDS: Final = 300.0
"""The rate of a live run is that of the last 5 minutes."""
PARTS: Final = {
    "boot": "boot",
    "model": "model",
    "tools": "toolSeconds",
    "verifier": "verifier",
    # Waiting, and the agent's own time. Calls at the same time can be longer together than their rollout.
    "rest": "max(0, seconds - coalesce(boot, 0) - coalesce(model, 0) - coalesce(toolSeconds, 0)"
    " - coalesce(verifier, 0))",
    "total": "seconds",
}

Json = dict[str, Any]
_GRADED: Final = "outcome = 'Completed' AND reward IS NOT NULL"


FIGURES_OF_A_ROW: Final = ("sealed", "masked", "graded", "mean", "standardError", "passAt1", "passAtK")
"""Figures of a run in the list of runs."""


def facts(run: RunFolder) -> Json:
    """Return what a page shows of a run that does not change while it runs."""
    spec, prices = run.job.spec, _prices(run)
    return {
        "folder": run.folder,
        "name": run.job.metadata.name,
        "created": run.job_file.created,
        "mode": spec.mode.value,
        "model": model_name(run),
        "agent": spec.agent.type,
        "k": spec.group_size,
        "total": run.total,
        "currency": prices.currency if prices else None,
    }


def summary(run: RunFolder, table: RolloutTable, *, now: float) -> Json:
    """Return figures, charts and causes of failures of a run so far."""
    sums = table.query(
        "SELECT count(*), coalesce(sum(turns), 0), coalesce(sum(tools), 0), coalesce(sum(promptTokens), 0), "
        "coalesce(sum(completionTokens), 0), coalesce(sum(cachedTokens), 0), min(started), max(finished), "
        "sum(outcome != 'Completed'), coalesce(sum(lost), 0), coalesce(sum(dropped > 0), 0), "
        "coalesce(sum(forgeable), 0) FROM rollouts"
    )[0]
    names = ("sealed", "turns", "tools", "promptTokens", "completionTokens", "cachedTokens", "started", "finished")
    values: Json = dict(zip((*names, "masked", "lost", "cheats", "forgeable"), sums, strict=True))
    agent, command = run.job.spec.agent, run.job_file.command
    return (
        facts(run)
        | values
        | {
            "command": None if command is None else visible(command),
            "canBranch": not (agent.is_program or agent.mcp_servers),
            "masked": values["masked"] or 0,
            "groups": table.query('SELECT count(DISTINCT "group") FROM rollouts')[0][0],
            "cost": cost(_prices(run), values),
            **_rewards(table, run.job.spec.group_size),
            "ended": dict(
                table.query("SELECT ended, count(*) FROM rollouts GROUP BY ended ORDER BY count(*) DESC, ended")
            ),
            "histogram": _histogram(table),
            "parts": _parts(table),
            "labels": _labels(table),
            "causes": _causes(table),
            **_speed(table, run.total, now),
        }
    )


def of_statistics(stats: Mapping[str, Any], k: int) -> Json:
    """Return those figures of a run that `stats.json` has: they are there before a large run is read."""
    rewards = stats["reward"]
    return {
        "sealed": stats["rollouts"],
        "masked": stats["rollouts"] - stats["outcomes"].get("Completed", 0),
        "graded": rewards["count"],
        "mean": rewards["mean"],
        "standardError": rewards["standardError"],
        "passAt1": stats["passAtK"].get("1"),
        "passAtK": stats["passAtK"].get(str(k)),
    } | {name: stats[name] for name in ("turns", "promptTokens", "completionTokens", "cachedTokens")}


def row(run: Overview) -> Json:
    """Return a finished run as a row of the list of runs."""
    stats, prices = run.stats, _prices(run)
    figures = of_statistics(stats, run.job.spec.group_size)
    return (
        facts(run)
        | {name: figures[name] for name in FIGURES_OF_A_ROW}
        | {
            "tasks": run.job_file.tasks.count,
            "tokens": stats["promptTokens"] + stats["completionTokens"],
            "duration": None if run.ended is None else run.ended - run.job_file.created,
            "cost": cost(prices, stats),
            "state": state_of_overview(run),
            "aborted": run.aborted,
            "damaged": run.damaged,
        }
    )


def row_of_damaged(run: DamagedRun) -> Json:
    """Return a run whose `job.json` cannot be read as a row of the list of runs."""
    texts = dict.fromkeys(("mode", "model", "agent"), "")
    missing = (*FIGURES_OF_A_ROW, "total", "currency", "duration", "cost", "aborted")
    counts = dict.fromkeys(("sealed", "masked", "graded", "tasks", "tokens"), 0)
    return (
        dict.fromkeys(missing)
        | texts
        | counts
        | {"folder": run.folder, "name": run.folder, "created": run.written, "k": 1, "damaged": run.problem}
        | {"state": "damaged"}
    )


def _prices(run: RunFolder) -> Prices | None:
    model = run.job.spec.model
    return model.prices if model else None


def cost(prices: Prices | None, tokens: Mapping[str, Any]) -> float | None:
    """Return the price of tokens; None without prices."""
    if prices is None:
        return None
    cached = tokens["cachedTokens"] if prices.cached is not None else 0
    parts = (tokens["promptTokens"] - cached, prices.prompt), (cached, prices.cached or 0)
    return sum(count * price for count, price in (*parts, (tokens["completionTokens"], prices.completion))) / 1e6


def model_name(run: RunFolder) -> str:
    """Return the name of the model that the job calls, or the kind of it; empty without a model."""
    model = run.job.spec.model
    if model is None:
        return ""
    if model.endpoint is not None:
        return model.endpoint.name
    if model.server is not None:
        return model.server.model.name
    return model.server_ref or model.function or "scripted"


def _rewards(table: RolloutTable, k: int) -> Json:
    rewards, passed = defaultdict[int, list[float]](list), defaultdict[int, int](int)
    for group, reward, is_passed in table.query(f'SELECT "group", reward, passed FROM rollouts WHERE {_GRADED}'):
        rewards[group].append(reward)
        passed[group] += is_passed or 0
    sizes = {group: len(members) for group, members in rewards.items()}
    whole = [group for group, size in sizes.items() if size >= k]
    values = [reward for members in rewards.values() for reward in members]
    return {
        "graded": len(values),
        "mean": mean(values),
        "standardError": standard_error(list(rewards.values())),
        "passAt1": mean([passed[group] / size for group, size in sizes.items()]),
        "passAtK": mean([pass_at_k(sizes[group], passed[group], k) for group in whole]),
    }


def _histogram(table: RolloutTable) -> Json | None:
    low, high = table.query(f"SELECT min(reward), max(reward) FROM rollouts WHERE {_GRADED}")[0]
    if low is None:
        return None
    low, high = min(low, 0.0), max(high, 1.0)
    found = table.query(
        f"SELECT CAST(round({BINS - 1} * (reward - ?) / (? - ?)) AS INTEGER) AS bin, count(*) FROM rollouts "
        f"WHERE {_GRADED} GROUP BY bin",
        (low, high, low),
    )
    counts = dict(found)
    return {"low": low, "high": high, "counts": [counts.get(bin_, 0) for bin_ in range(BINS)]}


def _parts(table: RolloutTable) -> list[Json]:
    parts = []
    whole = table.query("SELECT coalesce(sum(seconds), 0) FROM rollouts")[0][0]
    for name, column in PARTS.items():
        values = [row[0] for row in table.query(f"SELECT {column} FROM rollouts WHERE {column} IS NOT NULL ORDER BY 1")]
        if values:
            p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
            share = sum(values) / whole if whole else 0.0
            parts.append({"name": name, "median": statistics.median_low(values), "p95": p95, "share": share})
    return parts


def _labels(table: RolloutTable) -> list[Json]:
    """Return the points of a learning curve, in the order of submission."""
    found = table.query(
        f"SELECT label, count(*), avg(reward) FROM rollouts WHERE {_GRADED} AND label IS NOT NULL "
        'GROUP BY label ORDER BY min("group")'
    )
    return [{"label": label, "graded": graded, "mean": average} for label, graded, average in found]


_ERRORS: Final = {"Exception": "error", "Tool": "toolError", "Plugin": "pluginError", "Verifier": "verifierError"}
"""Column of each kind of cause that is an error."""


def _causes(table: RolloutTable) -> list[Json]:
    """Return why rollouts failed or did not end by themselves, the most frequent first."""
    found: list[Json] = []
    kinds = (
        ("Masked", "outcome || ': ' || coalesce(reason, 'no reason')", "outcome != 'Completed'"),
        *((kind, column, f"{column} IS NOT NULL") for kind, column in _ERRORS.items()),
        ("Stopped", "ended", "outcome = 'Completed' AND ended NOT IN ('Finished', 'AgentError')"),
        ("Cheat", "'Files that could change the verdict'", "dropped > 0"),
    )
    for kind, title, condition in kinds:
        rows = table.query(
            f'SELECT {title}, count(*), min("index"), min(message) FROM rollouts WHERE {condition} '
            f"GROUP BY 1 ORDER BY 2 DESC LIMIT {MOST_CAUSES}"
        )
        found += [
            {"kind": kind, "title": text, "count": count, "first": first, "where": _where(kind, text)}
            | ({"message": message} if kind in ("Masked", "Stopped") else {})
            for text, count, first, message in rows
        ]
    return sorted(found, key=lambda cause: -cause["count"])[:MOST_CAUSES]


def _where(kind: str, title: str) -> str:
    """Return the filter that shows a cause's rollouts."""
    if kind == "Masked":
        outcome, _, reason = title.partition(": ")
        return f'outcome == "{outcome}"' + ("" if reason == "no reason" else f" and reason == {_quoted(reason)}")
    if kind == "Cheat":
        return "dropped > 0"
    return f"{_ERRORS.get(kind, 'ended')} == {_quoted(title)}"


def _quoted(text: str) -> str:
    """Return a text as a filter writes it: `"` and `\\` get a backslash."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _speed(table: RolloutTable, total: int | None, now: float) -> Json:
    """Return rollouts per minute in the last minutes, and the seconds until the end at that rate, which an open job does
    not have.
    """
    times: Sequence[tuple[Any, ...]] = table.query(
        "SELECT count(*), min(started) FROM rollouts WHERE finished > ?", (now - RATE_SECONDS,)
    )
    count, first = times[0]
    if not count:
        return {"perMinute": None, "secondsLeft": None}
    rate = count / max(now - max(first, now - RATE_SECONDS), 1.0)
    return {"perMinute": 60 * rate, "secondsLeft": None if total is None else (total - len(table)) / rate}

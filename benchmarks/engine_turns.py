"""The engine's cost of a turn: concurrent rollouts with a model that answers immediately, compared with verifiers and
Inspect.
"""

from typing import Any

from benchmarks.conversation import Subject
from benchmarks.instant_model import NAME, instant_model
from benchmarks.jobs import endpoint, inline_tasks, rollout_job
from benchmarks.measuring import memory_folder
from benchmarks.peers import INSPECT, VERIFIERS, Peer, install
from benchmarks.report import Row, Target, comparison

ROLLOUTS = 512  # concurrent
GROUP_SIZE = 8
TURNS = 10
MOST_CPU = Target("at most", 1.5)  # total ms for a turn
MOST_MEMORY = Target("at most", 150)  # KB for each concurrent rollout
ENGINE = "benchmarks.subjects.engine"


def measure() -> list[Row]:
    """Return turns per second and core, processor time of a turn, and memory of a rollout, for us and for the peers."""
    with instant_model(TURNS) as warming, instant_model(TURNS, together=ROLLOUTS) as base_url:
        ours = _ours(warming, base_url)
        theirs = _theirs(VERIFIERS, "benchmarks.subjects.verifiers_env", warming, base_url)
        inspect = _theirs(INSPECT, "benchmarks.subjects.inspect_eval", warming, base_url)
    named = f"verifiers {VERIFIERS.version}"
    named_inspect = f"Inspect {INSPECT.version}"
    memory = _kilobytes(ours)
    return [
        comparison("turns a second, of one process", _rate(ours), "turns/s", named, _rate(theirs)),
        comparison(
            "turns a second and core", _per_core(ours), "turns/s", named, _per_core(theirs), Target("at least", 10)
        ),
        comparison("turns a second and core", _per_core(ours), "turns/s", named_inspect, _per_core(inspect)),
        Row("processor time of a turn", _cpu_ms(ours), "ms", f"{named} {_cpu_ms(theirs):.3g}", target=MOST_CPU),
        Row(
            f"memory of a rollout, {ROLLOUTS} at once",
            memory,
            "KB",
            f"{named} {_kilobytes(theirs):.3g}, {named_inspect} {_kilobytes(inspect):.3g}",
            target=MOST_MEMORY,
        ),
        comparison("memory of the process, at most", ours["peak_bytes"] / 1e6, "MB", named, theirs["peak_bytes"] / 1e6),
    ]


def _ours(warming: str, base_url: str) -> dict[str, Any]:
    with Subject(ENGINE) as subject, memory_folder() as folder:

        def job(name: str, url: str, rollouts: int) -> dict[str, Any]:
            return rollout_job(
                str(folder / name),
                tasks=inline_tasks(rollouts // GROUP_SIZE),
                model=endpoint(url),
                group_size=GROUP_SIZE,
                concurrency=ROLLOUTS,
            ).wire()

        # A warm-up, because imports, compilation and allocations at first use are counted for neither side.
        subject.ask(job=job("warm", warming, GROUP_SIZE))
        cost = subject.ask(job=job("measured", base_url, ROLLOUTS))
    if cost["concurrent"] != ROLLOUTS:
        raise RuntimeError(f"expected {ROLLOUTS} concurrent rollouts, found at most {cost['concurrent']}")
    return cost


def _theirs(peer: Peer, module: str, warming: str, base_url: str) -> dict[str, Any]:
    with Subject(module, install(peer)) as subject:
        subject.ask(base_url=warming, model=NAME, rollouts=GROUP_SIZE, turns=TURNS)
        return subject.ask(base_url=base_url, model=NAME, rollouts=ROLLOUTS, turns=TURNS)


def _rate(cost: dict[str, Any]) -> float:
    return float(cost["turns"] / cost["wall_seconds"])


def _per_core(cost: dict[str, Any]) -> float:
    return float(cost["turns"] / cost["cpu_seconds"])


def _cpu_ms(cost: dict[str, Any]) -> float:
    return float(cost["cpu_seconds"] / cost["turns"] * 1e3)


def _kilobytes(cost: dict[str, Any]) -> float:
    return float((cost["peak_bytes"] - cost["start_bytes"]) / ROLLOUTS / 1000)

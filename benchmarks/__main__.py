"""`python -m benchmarks [NAME…] [--json FILE]`: measures this project and its peers in one run on this machine."""

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks.conversation import ROOT
from benchmarks.on_cluster import NoCluster
from benchmarks.report import Row, print_table, write_json

COMPARED = (
    "executor_start",
    "tool_call",
    "engine_turns",
    "environments",
    "journal_overhead",
    "resume",
    "resume_large",
    "prefix_affinity",
    "session_proxy",
    "policy_update",
    "cancelling",
    "task_loading",
    "branching",
    "operator_memory",
    "journal",
    "dockerfiles",
    "memory_overcommit",
    "viewer",
)
ON_CLUSTER = (
    "cluster_tool_call",
    "cluster_workspaces",
    "cluster_cold_start",
    "cluster_jobs",
    "cluster_pool",
    "cluster_scale",
    "cluster_gateway",
)
"""Benchmarks that need the test cluster."""
PRINTED = ("workspaces", "many_workspaces")
"""They run in processes of their own and print their own tables, because their zygotes are forked before other modules are
imported.
"""
ALL = (*COMPARED, *ON_CLUSTER, *PRINTED)
PLAIN_WIDTH = 150  # columns of the table if the output is no terminal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    names: list[str] = options.names or list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"unknown benchmark: {', '.join(unknown)}; the benchmarks are {', '.join(ALL)}")
    found: dict[str, list[Row]] = {}
    failed = []
    try:
        for name in names:
            print(f"measuring {name}", file=sys.stderr)
            if name in PRINTED:
                if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode:
                    failed.append(name)
                continue
            try:
                found[name] = import_module(f"benchmarks.{name}").measure()
            except NoCluster as error:
                print(f"not measured: {name}: {error}", file=sys.stderr)
                # If all benchmarks run, a missing cluster is no error.
                failed += [name] if options.names else []
    finally:  # shows the finished benchmarks also if a later one fails
        if found:
            print_table(found, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
        if options.json is not None:
            write_json(found, options.json)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

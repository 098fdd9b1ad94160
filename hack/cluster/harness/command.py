"""Shared by all executables of hack/cluster: arguments, messages on stderr, and errors without a traceback."""

import argparse
import sys
from collections.abc import Callable

from .addons import AddonError
from .archives import ArchiveError
from .build import BuildError
from .cluster import ClusterError
from .layout import LayoutError
from .nodes import NodeError

DEFAULT_NAME = "test"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the argument parser of one executable, with the option --name."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--name", default=DEFAULT_NAME, help="the cluster's name (default: %(default)s)")
    return made


def action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", verb: str, text: str
) -> argparse.ArgumentParser:
    """Adds one action of an executable; --name may also follow the action."""
    made = actions.add_parser(verb, help=text, description=text)
    made.add_argument("--name", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return made


def say(line: str) -> None:
    """Prints a progress message on stderr, because stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def main(act: Callable[[], int | None]) -> None:
    """Runs an executable to its end; errors are printed as one message."""
    try:
        sys.exit(act() or 0)
    except (AddonError, ArchiveError, BuildError, ClusterError, LayoutError, NodeError, KeyError) as error:
        say(f"{sys.argv[0]}: {error.args[0] if isinstance(error, KeyError) else error}")
        sys.exit(1)

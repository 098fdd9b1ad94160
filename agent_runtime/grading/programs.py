"""Check, before a verifier runs, whether its first program exists.

Exit code 127 is no evidence afterwards: code under test can return it too, and a policy must not be able to disguise a
failed test as a verifier that could not start. Only the first program is checked, because earlier commands may install
later ones from the agent's work.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from agent_runtime.sandboxes.base import Workspace

PROBE_SECONDS = 60
"""Deadline of the check, which may start Python once on a busy machine."""

_PREPARATIONS = frozenset({"cd", "export", "set", "umask", "ulimit"})
"""Shell built-ins that can precede the first program and do not change where it is found."""

_BUILT_IN = frozenset({"[", "[[", "echo", "eval", "exec", "exit", "false", "printf", "source", "test", "true", "."})
_KEYWORDS = frozenset({"!", "{", "(", "((", "case", "for", "function", "if", "select", "time", "until", "while"})
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.+-]+|/[A-Za-z0-9_./+-]+")
_PYTHON = re.compile(r"(?:/.*/)?python[0-9.]*")


def first_program(command: str) -> list[str] | None:
    """Return the words of the first program that a shell command starts, or None if unknown.

    Also None for a path below the working directory: the agent may have removed that program, which counts against the
    agent.
    """
    try:
        lexer = shlex.shlex(command.replace("\\\n", " ").strip().partition("\n")[0], posix=True, punctuation_chars=True)
        words = list(lexer)
    except ValueError:
        return None
    while words:
        end = next((i for i, word in enumerate(words) if word in ("&&", ";")), len(words))
        first, words = words[:end], words[end + 1 :]
        while first and re.match(r"[A-Za-z_]\w*=", first[0]):
            if first[0].startswith("PATH="):
                return None
            first = first[1:]
        if not first or first[0] in _PREPARATIONS:
            if any(word.startswith("PATH=") for word in first):
                return None
            continue
        known = first[0] in _BUILT_IN | _KEYWORDS
        is_defined = "".join(first[1:2]).startswith("(")  # the command defines this program as a shell function
        return None if known or is_defined or "||" in first or not _PLAIN_NAME.fullmatch(first[0]) else first
    return None


def probe_script(command: str) -> str | None:
    """Return a shell script that prints which program the command lacks at its start; None if nothing can be checked."""
    words = first_program(command)
    if words is None:
        return None
    program = shlex.quote(words[0])
    script = f"command -v {program} >/dev/null 2>&1 || {{ echo {shlex.quote(f'program {words[0]}')}; exit 0; }}"
    if _PYTHON.fullmatch(words[0]) and words[1:3] == ["-m", "pytest"]:
        # Remove the working directory from the path, so that the agent's files cannot fake pytest.
        code = (
            "import sys; sys.path.pop(0); import importlib.util as u; u.find_spec('pytest') or print('module pytest')"
        )
        script += f"\n{program} -c {shlex.quote(code)} 2>/dev/null"
    return f"{script}\nexit 0"


async def missing_program(
    workspace: Workspace,
    commands: Sequence[str],
    *,
    key: str,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    brought: Collection[str] = (),
) -> str | None:
    """Return the missing program or module of a verifier's first command, such as `program cargo`; None if it can
    start. `brought` are the paths of files that the verifier adds. Used before the first rollout and before each
    grading. Raises errors of `Workspace.run`.
    """
    words = first_program(commands[0])
    script = None if words is None or words[0] in brought else probe_script(commands[0])
    # Even without a program to look up, this shows whether the user exists and may enter the working directory.
    result = await workspace.run(script or "exit 0", key=key, deadline_seconds=PROBE_SECONDS, user=user, env=env)
    if result.exit_code is None and result.signal is None and result.cause == "NotStarted":
        return f"user {user or 'of the sandbox'} ({result.stderr.decode(errors='replace').strip()})"
    lines = result.stdout.decode(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("program ", "module "))), None)

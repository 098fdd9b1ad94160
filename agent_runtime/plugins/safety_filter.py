"""The built-in plugin SafetyFilter, and its shell parser, which finds simple commands without running them.

The parser never fails, and takes linear time, because the policy controls the text. The filter detects mistakes of
people or models. It does not detect commands that are hidden on purpose, such as in a variable or a file; against
these, only the sandbox protects.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import dropwhile, pairwise
from typing import Annotated, Any

from pydantic import Field

from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.base import ActionFilter, Refuse, RolloutInfo
from agent_runtime.tools.base import decoded_arguments

DEPTH = 8
"""Levels of nested commands that are examined: `sh -c "sh -c …"`."""

_SEPARATORS = "();<>|&\n{}"
_COMMENT = re.compile(r"(?m)^[ \t]*#.*$")
_HERE_DOCUMENT = re.compile(
    r"<<-?\s*(['\"]?)([A-Za-z_]\w*+)\1(?P<rest>[^\n]*+)(?:\n.*?(?:^[ \t]*\2[ \t]*$|\Z)|\Z)", re.S | re.M
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
_KEYWORDS = frozenset(
    ["if", "then", "elif", "else", "do", "while", "until", "!", "time", "exec", "command", "builtin", "coproc", "-"]
)
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "busybox"))
_WRAPPERS = {
    "sudo": "ugpCrtTUDh",
    "doas": "uC",
    "env": "uCS",
    "nice": "n",
    "ionice": "cnp",
    "nohup": "",
    "setsid": "",
    "stdbuf": "ioe",
    "timeout": "ks",
    "xargs": "IndPLsEa",
}
"""Programs that run the command in their arguments, and their options that take a value."""


def simple_commands(text: str, depth: int = 0) -> Iterator[list[str]]:
    """Return the words of each command, the program first; also of commands in substitutions, `sh -c`, `xargs` and the
    like.
    """
    if depth > DEPTH:
        return
    text = _HERE_DOCUMENT.sub(r"\g<rest>\n", _COMMENT.sub("", text.replace("\\\n", " ")))
    for inner in _substitutions(text):
        yield from simple_commands(inner, depth + 1)
    words: list[str] = []
    for word in [*_words(text), "\n"]:
        if word and all(letter in _SEPARATORS for letter in word):
            yield from _unwrapped(words, depth)
            words = []
        else:
            words.append(word)


def program(words: Sequence[str]) -> str:
    """Return the name of a command's program. A path counts as that program only in folders where programs are
    installed.
    """
    folder, name = posixpath.split(words[0])
    return name if folder in ("", "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin") else ""


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return list(lexer)
    except ValueError:  # for an unclosed quote, which the shell would refuse too, an approximate split is enough
        return [part for part in re.split(r"([();<>|&\n{}]+)|\s+", text) if part]


def _substitutions(text: str) -> Iterator[str]:
    """Return the contents of `$(…)` and of backticks, which run even in double quotes."""
    opened: list[list[str]] = []
    levels: list[int] = []
    for piece in re.split(r"(\$\(|[()])", text):
        if piece == "$(":
            opened.append([])
            levels.append(1)
        elif opened:
            levels[-1] += (piece == "(") - (piece == ")")
            if levels[-1]:
                opened[-1].append(piece)
                continue
            yield "".join(opened.pop())  # nested commands are yielded separately
            levels.pop()
    yield from re.findall(r"`([^`]*)`", text)


def _unwrapped(words: Sequence[str], depth: int) -> Iterator[list[str]]:
    """Return the command itself, and the one that it runs."""
    if depth > DEPTH:
        return
    rest = list(dropwhile(lambda word: word in _KEYWORDS or _ASSIGNMENT.fullmatch(word), words))
    if not rest:
        return
    yield rest
    name = program(rest)
    if name in _WRAPPERS:
        yield from _unwrapped(_behind_options(rest[1:], _WRAPPERS[name], numbers=name == "timeout"), depth + 1)
    elif name in _SHELLS:
        for option, script in pairwise(rest):
            if "c" in option and re.fullmatch(r"-[a-z]+", option):
                yield from simple_commands(script, depth + 1)
    elif name == "eval":
        yield from simple_commands(" ".join(rest[1:]), depth + 1)
    elif name == "find":
        places = [place for place, word in enumerate(rest) if word in ("-exec", "-execdir", "-ok", "-okdir")]
        for place, end in pairwise([*places, len(rest)]):
            yield from _unwrapped(rest[place + 1 : end], depth)


def _behind_options(words: Sequence[str], with_word: str, *, numbers: bool) -> list[str]:
    place = 0
    while place < len(words):
        word = words[place]
        if re.fullmatch(rf"-[{with_word or '-'}]", word) and with_word:
            place += 2
        elif word.startswith("-") or _ASSIGNMENT.fullmatch(word) or (numbers and re.fullmatch(r"[\d.]+[smhd]?", word)):
            place += 1
        else:
            break
    return list(words[place:])


LONGEST = 128 * 1024
"""Longest command that is examined: the longest argument of a program in Linux."""
BLOCKED_PROGRAMS = ("shutdown", "reboot", "halt", "poweroff", "mkfs", "mkfs.*", "format")

_SYSTEM = re.compile(r"/(?:bin|boot|dev|etc|home|lib|lib64|opt|proc|root|run|sbin|srv|sys|usr|var)?")
_DISK = re.compile(r"/dev/(?:sd|hd|vd|xvd|nvme|mmcblk|mapper/)\w*")
_FORK_BOMB = re.compile(r"(\S{1,64})\s*+\(\)\s*\{\s*\1\s*\|\s*\1\s*&\s*\}")


class SafetyFilter(ActionFilter):
    """Refuses commands that would destroy the machine they run on, and tells the model why.

    It examines programs and their arguments instead of searching for words. It prevents accidents that would spoil a
    rollout; the sandbox is the protection against attacks.
    """

    def __init__(
        self,
        blocked_programs: Annotated[
            list[str], Field(description="Programs that are not to be started; * stands for anything.")
        ] = list(BLOCKED_PROGRAMS),  # noqa: B006 it is copied
        blocked_patterns: Annotated[
            list[str], Field(description="Regular expressions; a command in which one is found is refused.")
        ] = [],  # noqa: B006
        arguments: Annotated[
            list[str], Field(description="Arguments that are shell commands: of any tool, or of one (`tool.argument`).")
        ] = ["command", "terminal.text"],  # noqa: B006
    ) -> None:
        self.blocked_programs, self.arguments = list(blocked_programs), set(arguments)
        self.blocked_patterns = [re.compile(pattern) for pattern in blocked_patterns]

    async def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall) -> Refuse | ToolCall | None:
        try:
            arguments = decoded_arguments(call.arguments)
        except ValueError:
            return None  # the call is executed, so the model gets the tool's own error message
        commands = (value for name, value in arguments.items() if {name, f"{call.name}.{name}"} & self.arguments)
        return next((Refuse(reason) for command in commands if (reason := self.reason(_text(command)))), None)

    def reason(self, command: str) -> str | None:
        if len(command) > LONGEST:
            return f"the command has {len(command)} characters; the limit is {LONGEST}. Write a file in parts."
        for pattern in self.blocked_patterns:
            if pattern.search(command):
                return f"the command matches {pattern.pattern!r}, which this job does not allow. Find another way."
        if _FORK_BOMB.search(command):
            return "it starts processes without end. Start as many as the task needs."
        for words in simple_commands(command):
            name = program(words)
            if any(fnmatch(name, blocked) for blocked in self.blocked_programs):
                return f"{name} is not allowed here. The task can be done without it."
            if reason := _harm(name, words[1:]):
                return f"{shlex.join(words)[:200]} {reason}"
        return None


def _harm(name: str, arguments: Sequence[str]) -> str | None:
    options = [word for word in arguments if word.startswith("-")]
    recursive = any(
        word in ("--recursive", "--no-preserve-root") or (set("rR") & set(word) and re.fullmatch(r"-\w+", word))
        for word in options
    )
    system = next((word for word in arguments if _is_system(word)), None)
    if name in ("rm", "chmod", "chown", "chgrp") and recursive and system is not None:
        deed = "removes" if name == "rm" else "changes"
        return (
            f"{deed} {system} with all below it, on which everything here depends. Name the files of the task instead."
        )
    if name == "find" and "-delete" in arguments and arguments and _is_system(arguments[0]):
        return f"removes {arguments[0]} with all below it. Name the files of the task instead."
    if name in ("dd", "tee", "cp", "shred", "wipefs") and any(_DISK.search(word) for word in arguments):
        return "overwrites a disk. Write to a file instead."
    if name == "kill" and arguments and arguments[-1] == "-1" and len(arguments) > 1:
        return "ends every process. Name the one that is meant."
    if name in ("systemctl", "init", "telinit") and {"poweroff", "reboot", "halt", "0", "6"} & set(arguments):
        return "ends the machine. The task can be done without it."
    return None


def _is_system(path: str) -> bool:
    if path in ("~", "$HOME", "${HOME}", "~/", "~/*", "$HOME/*"):
        return True
    if not path.startswith("/"):
        return False
    bare = "/" + posixpath.normpath(path.removesuffix("*")).strip("/")
    return _SYSTEM.fullmatch(bare) is not None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(str(word) for word in value)
    return value if isinstance(value, str) else ""

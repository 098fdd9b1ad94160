"""The simple commands in a line of shell, as far as they can be seen without running it: pure, and never fails.

Its time grows with the length of the text and no faster: the policy writes the text, and every rollout waits for it.

It is for telling a person's or a model's mistake from an ordinary command. What hides on purpose, in a variable or a file,
is not found: what holds then is the sandbox.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import dropwhile, pairwise

DEPTH = 8
"""Commands inside of commands that are looked into: `sh -c "sh -c …"`."""

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
"""Programs that run the command behind them, and their options that take a word of their own."""


def simple_commands(text: str, depth: int = 0) -> Iterator[list[str]]:
    """The words of each command, the program first; those inside of substitutions, `sh -c`, `xargs` and the like too."""
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
    """The name of a command's program; a path counts as the program of that name where programs are installed only."""
    folder, name = posixpath.split(words[0])
    return name if folder in ("", "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin") else ""


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return list(lexer)
    except ValueError:  # a quote that is not closed: the shell would not run it either, so nearly right will do
        return [part for part in re.split(r"([();<>|&\n{}]+)|\s+", text) if part]


def _substitutions(text: str) -> Iterator[str]:
    """What stands in `$(…)` and in backticks, which double quotes do not keep from running."""
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
            yield "".join(opened.pop())  # nested commands are left out: each is yielded separately
            levels.pop()
    yield from re.findall(r"`([^`]*)`", text)


def _unwrapped(words: Sequence[str], depth: int) -> Iterator[list[str]]:
    """The command itself, and the one that it runs."""
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

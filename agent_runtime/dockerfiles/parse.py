"""Reads a Dockerfile as BuildKit's frontend does (`frontend/dockerfile/parser` and `instructions` of moby/buildkit).

BuildKit stops at the first error. Here each error is a `Problem`, and reading continues with the next instruction.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from agent_runtime.dockerfiles.instructions import (
    Arg,
    Checked,
    Cmd,
    Command,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    From,
    Healthcheck,
    Heredoc,
    Instruction,
    Mount,
    OnBuild,
    Problem,
    Run,
    Shell,
    Stage,
    User,
    Workdir,
)
from agent_runtime.dockerfiles.mounts import MountError, read_mount
from agent_runtime.dockerfiles.words import DEFAULT_ESCAPE, SPACES, WordError, split_words

_DIRECTIVE: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9]*)[\t\n\f\r ]*=[\t\n\f\r ]*(.+?)[\t\n\f\r ]*\Z")
_DIRECTIVES: Final = ("syntax", "escape", "check")
_SYNTAX: Final = re.compile(r"(?:.*/)?dockerfile(?:-upstream)?(?:[:@].*)?\Z")
_WHITE_SPACE: Final = re.compile(r"[\t\v\f\r ]+")
_HEREDOC: Final = re.compile(r"([0-9]*)<<(-?)[\t\n\f\r ]*([^<]*)\Z")
_LEADING_TABS: Final = re.compile(r"^\t+", re.MULTILINE)
_STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9-_.]*\Z")
_DURATION: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_NANOSECONDS: Final = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_LONGEST_DURATION: Final = 2**63 - 1
_MOST_RETRIES: Final = 2**31 - 1
_ASCII_SPACES: Final = "\t\n\v\f\r "
"""Separators of flags."""
_SHOWN: Final = 80
"""Limit of characters of the Dockerfile in a message."""


def parse(text: str) -> Dockerfile:
    """Parse a Dockerfile. Any text is accepted; what is wrong in it is in `problems`."""
    return _Parser(text).parse()


class _SyntaxProblem(ValueError):
    """Ends the reading of one instruction."""


@dataclass
class _Lines:
    """The lines of a file, each with its line end; `number` is that of the line read last."""

    lines: list[str]
    number: int = 0

    def next(self) -> str | None:
        if self.number == len(self.lines):
            return None
        self.number += 1
        return self.lines[self.number - 1]


@dataclass
class _Statement:
    """An instruction split into its parts."""

    line: int
    keyword: str
    """In upper case."""
    written_keyword: str
    flags: list[str]
    rest: str
    text: str
    """The whole instruction, its continuation lines joined."""
    words: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    is_json: bool = False
    heredocs: list[Heredoc] = field(default_factory=list)
    child: "_Statement | None" = None
    """Of ONBUILD."""

    @property
    def command(self) -> Command:
        return tuple(self.words) if self.is_json else " ".join(self.words)


@dataclass
class _Flags:
    """Values of an instruction's flags."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    booleans: dict[str, bool] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        values = self.texts.get(name)
        return values[0] if values else None


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = _Lines(_split_lines(text))
        self._escape = DEFAULT_ESCAPE
        self._directives: set[str] | None = set()
        """Directives seen; None after the first line that is not one."""
        self._problems: list[Problem] = []
        self._global_args: list[Arg] = []
        self._stages: list[tuple[From, list[Instruction]]] = []

    def parse(self) -> Dockerfile:
        empty = True
        for line, text in self._statements():
            empty = False
            try:
                self._add(self._read(line, text))
            except _SyntaxProblem as problem:
                self._report(line, str(problem))
        if empty:
            self._report(max(1, self._lines.number), "the Dockerfile has no instructions; expected FROM and others")
        elif not self._stages and not self._problems:
            self._report(self._lines.number, "the Dockerfile has no FROM; add one, for example FROM debian:12")
        stages = tuple(Stage(start, tuple(instructions)) for start, instructions in self._stages)
        return Dockerfile(tuple(self._global_args), stages, self._escape, tuple(self._problems))

    def _report(self, line: int, message: str) -> None:
        self._problems.append(Problem(line, message))

    # Lines

    def _statements(self) -> Iterator[tuple[int, str]]:
        """Yield each instruction with its first line, continuation lines joined."""
        while (raw := self._lines.next()) is not None:
            line = raw.rstrip("\r\n").lstrip(SPACES)
            self._read_directive(line)
            start = self._lines.number
            text, continues = self._without_continuation("" if line.startswith("#") else line)
            if not text and not continues:
                continue
            parts = [text]
            while continues and (raw := self._lines.next()) is not None:
                line = raw.rstrip("\r\n")
                stripped = line.lstrip(SPACES)
                # BuildKit skips comments and, with a warning, empty lines.
                if not stripped or stripped.startswith("#"):
                    continue
                text, continues = self._without_continuation(line)
                parts.append(text)
            yield start, "".join(parts)

    def _without_continuation(self, line: str) -> tuple[str, bool]:
        stripped = line.rstrip(" \t")
        if stripped.endswith(self._escape) and not stripped[:-1].endswith(self._escape):
            return stripped[:-1], True
        return line, False

    def _read_directive(self, line: str) -> None:
        """Read a parser directive, such as `# escape=`. They come before everything else, comments included."""
        if self._directives is None:
            return
        match = _DIRECTIVE.match(line[1:].lstrip(SPACES)) if line.startswith("#") else None
        name = match[1].lower() if match else ""
        if match is None or name not in _DIRECTIVES:
            self._directives = None
            return
        value = match[2]
        if name in self._directives:
            self._report(self._lines.number, f"the parser directive {name!r} is repeated; remove one")
        elif name == "escape" and value not in ("\\", "`"):
            self._report(self._lines.number, f"the parser directive 'escape' is {_shown(value)}; expected \\ or `")
        elif name == "escape":
            self._escape = value
        elif name == "syntax" and not _SYNTAX.match(value.partition(" ")[0]):
            self._report(
                self._lines.number,
                f"the parser directive 'syntax' names {_shown(value)}, another language than that of Dockerfiles; "
                "expected docker/dockerfile",
            )
        self._directives.add(name)

    # Statements

    def _read(self, line: int, text: str) -> _Statement:
        try:
            statement = self._split(line, text)
        except _SyntaxProblem:
            # The content of heredocs must not be read as instructions.
            keyword = _WHITE_SPACE.split(text.strip(SPACES), maxsplit=1)[0].upper()
            if keyword in ("RUN", "COPY", "ADD", "ONBUILD"):
                self._read_heredocs(text)
            raise
        with_heredocs = statement.child if statement.keyword == "ONBUILD" else statement
        if with_heredocs is not None and with_heredocs.keyword in ("RUN", "COPY", "ADD") and not with_heredocs.is_json:
            statement.heredocs = self._read_heredocs(text)
        return statement

    def _split(self, line: int, text: str) -> _Statement:
        written, *arguments = _WHITE_SPACE.split(text.strip(SPACES), maxsplit=1)
        flags, rest = _split_flags(arguments[0], self._escape) if arguments else ([], "")
        rest = rest.strip(SPACES)
        keyword = written.upper()
        statement = _Statement(line, keyword, written, flags, rest, text)
        match keyword:
            case "RUN" | "CMD" | "ENTRYPOINT" | "SHELL":
                self._split_command(statement, rest)
            case "COPY" | "ADD" | "VOLUME":
                items = _json_strings(rest)
                statement.is_json = items is not None
                statement.words = _split_at_white_space(rest) if items is None else items
            case "FROM" | "EXPOSE":
                statement.words = _split_at_white_space(rest)
            case "HEALTHCHECK":
                kind, command = _split_once(rest, SPACES)
                self._split_command(statement, command)
                statement.words = [kind, *statement.words] if kind else []
            case "ONBUILD":
                statement.child = self._split(line, rest) if rest else None
            case "ARG":
                statement.words = _quoted_words(rest, self._escape)
            case "ENV" | "LABEL":
                statement.pairs = _read_pairs(keyword, rest, self._escape)
            case _:
                statement.words = [rest] if rest else []
        return statement

    def _split_command(self, statement: _Statement, text: str) -> None:
        items = _json_strings(text)
        statement.is_json = items is not None
        statement.words = ([text] if text else []) if items is None else items

    def _read_heredocs(self, text: str) -> list[Heredoc]:
        if "<<" not in text:
            return []
        try:
            words = split_words(text, raw_quotes=True, raw_escapes=True)
        except WordError:
            return []  # BuildKit leaves such a line to the shell, which reports it.
        heredocs = [mark for word in words if (mark := _heredoc_mark(word)) is not None]
        return [self._read_heredoc(mark) for mark in heredocs]

    def _read_heredoc(self, mark: "_HeredocMark") -> Heredoc:
        lines: list[str] = []
        while (line := self._lines.next()) is not None:
            end = line.rstrip("\r\n")
            if (end.lstrip("\t") if mark.strips_tabs else end) == mark.name:
                return mark.heredoc("".join(lines))
            lines.append(line)
        raise _SyntaxProblem(
            f"the heredoc {_shown(mark.name)} does not end; expected a line that consists of {_shown(mark.name)}"
        )

    # Instructions

    def _add(self, statement: _Statement) -> None:
        if statement.keyword == "FROM":
            self._stages.append((self._from(statement), []))
            return
        instruction = _READERS.get(statement.keyword, _unknown)(statement)
        if isinstance(instruction, Arg) and not self._stages:
            self._global_args.append(instruction)
        elif not self._stages:
            raise _SyntaxProblem(f"{statement.keyword} comes before the first FROM; only ARG may")
        else:
            self._stages[-1][1].append(instruction)

    def _from(self, statement: _Statement) -> From:
        words = statement.words
        image, name, platform = words[0] if words else "", None, None
        # The stage is kept if its FROM is wrong, so that the instructions below it are not reported too.
        try:
            if len(words) == 3 and words[1].lower() == "as":
                name = words[2].lower()
                if not _STAGE_NAME.match(name):
                    raise _SyntaxProblem(
                        f"FROM has the stage name {_shown(words[2])}; expected a letter, then letters, digits, '-', "
                        "'_' and '.'"
                    )
            elif len(words) != 1:
                raise _SyntaxProblem(f"FROM has {_count(len(words), 'argument')}; expected FROM IMAGE [AS NAME]")
            platform = _flags(statement, texts=("platform",)).text("platform")
        except _SyntaxProblem as problem:
            self._report(statement.line, str(problem))
        return From(statement.line, image, name, platform or None)


def _split_lines(text: str) -> list[str]:
    """Split at line feeds only, and keep them."""
    lines = text.removeprefix("\ufeff").split("\n")
    ended = [f"{line}\n" for line in lines[:-1]]
    return [*ended, lines[-1]] if lines[-1] else ended


def _split_at_white_space(text: str) -> list[str]:
    return _WHITE_SPACE.split(text) if text else []


def _split_once(text: str, separators: str) -> tuple[str, str]:
    """Split at the first run of separators."""
    for at, character in enumerate(text):
        if character in separators:
            return text[:at], text[at:].lstrip(separators)
    return text, ""


def _split_flags(text: str, escape: str) -> tuple[list[str], str]:
    """Split the leading words that start with `--` off, without their quotes and escapes."""
    flags: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at] in _ASCII_SPACES:
            at += 1
        if not text.startswith("--", at):
            return flags, text[at:]
        word: list[str] = []
        quote = ""
        quoted = False
        while at < len(text) and (quote or text[at] not in _ASCII_SPACES):
            character = text[at]
            at += 1
            if character == quote:
                quote = ""
            elif not quote and character in "'\"":
                quote, quoted = character, True
            elif character != escape:
                word.append(character)
            elif at < len(text):
                word.append(text[at])
                at += 1
        flag = "".join(word)
        if flag == "--":
            return flags, text[at:]
        if flag or quoted:
            flags.append(flag)


def _quoted_words(text: str, escape: str) -> list[str]:
    """Split at white space outside quotes, and keep quotes and escapes for the expansion."""
    words: list[str] = []
    word: list[str] = []
    quote = ""
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if not quote and character in SPACES:
            if word:
                words.append("".join(word))
            word = []
            continue
        if character == escape and quote != "'":
            if at == len(text):
                break  # BuildKit drops an escape at the end.
            word.append(character + text[at])
            at += 1
            continue
        if character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        word.append(character)
    if word:
        words.append("".join(word))
    return words


def _json_strings(text: str) -> list[str] | None:
    """Return the strings of a JSON array; None if the text is not one, so that it has the shell form."""
    if not text.startswith("["):
        return None
    try:
        items = json.loads(text, parse_constant=_not_json, parse_int=_json_number, parse_float=_json_number)
    except ValueError:
        return None
    except RecursionError:
        items = [None]
    if any(not isinstance(item, str) for item in items):
        raise _SyntaxProblem(f"the JSON array {_shown(text)} has items that are not strings; quote each item")
    # Go replaces halves of surrogate pairs, which Python keeps.
    return [re.sub("[\ud800-\udfff]", "\ufffd", item) for item in items]


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _json_number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return number


@dataclass(frozen=True)
class _HeredocMark:
    """`<<NAME` in an instruction."""

    name: str
    expands: bool
    strips_tabs: bool

    def heredoc(self, written: str) -> Heredoc:
        content = _LEADING_TABS.sub("", written) if self.strips_tabs else written
        return Heredoc(self.name, content, self.expands, written)


def _heredoc_mark(word: str) -> _HeredocMark | None:
    match = _HEREDOC.match(word)
    if match is None or not match[3]:
        return None
    try:
        names = split_words(match[3])
        raw = split_words(match[3], raw_quotes=True)
    except WordError as error:
        raise _SyntaxProblem(f"the heredoc {_shown(word)} has a wrong name: {error}") from None
    if len(names) != 1 or len(raw) != 1:
        return None
    return _HeredocMark(names[0], _quotes(names[0]) == _quotes(raw[0]), match[2] == "-")


def _quotes(text: str) -> int:
    return text.count("'") + text.count('"')


def _flags(
    statement: _Statement, texts: Sequence[str] = (), lists: Sequence[str] = (), booleans: Sequence[str] = ()
) -> _Flags:
    """Read the flags; `lists` may be repeated."""
    flags = _Flags()
    names = [*texts, *lists, *booleans]
    for written in statement.flags:
        flag, equals, value = written.partition("=")
        name = flag[2:]
        if name not in names:
            raise _SyntaxProblem(f"{statement.keyword} has the unknown flag {_shown(flag)}{_suggestion(name, names)}")
        if name not in lists and (name in flags.texts or name in flags.booleans):
            raise _SyntaxProblem(f"{statement.keyword} has the flag {flag} twice; remove one")
        # A text may be empty, and a boolean stands alone, but not with an empty value.
        if (equals and not value) if name in booleans else not equals:
            raise _SyntaxProblem(f"the flag {flag} of {statement.keyword} has no value; expected {flag}=VALUE")
        if name not in booleans:
            flags.texts.setdefault(name, []).append(value)
        elif value.lower() in ("true", "false", ""):
            flags.booleans[name] = value.lower() != "false"
        else:
            raise _SyntaxProblem(f"the flag {flag} of {statement.keyword} is {_shown(value)}; expected true or false")
    return flags


def _suggestion(name: str, names: Sequence[str]) -> str:
    if not names:
        return "; it has no flags"
    expected = ", ".join(f"--{known}" for known in names)
    return f"; expected {expected}"


def _unknown(statement: _Statement) -> Instruction:
    if not statement.keyword:
        raise _SyntaxProblem("an instruction is missing after the continuation; remove it, or add an instruction")
    known = [*_READERS, "FROM"]
    close = difflib.get_close_matches(statement.keyword[:_SHOWN], known, 1)
    advice = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(known))}"
    raise _SyntaxProblem(f"unknown instruction {_shown(statement.written_keyword)}; {advice}")


def _one_argument(statement: _Statement, expected: str) -> str:
    if not statement.rest:
        raise _SyntaxProblem(f"{statement.keyword} has no argument; expected {expected}")
    return statement.rest


def _argument_alone(statement: _Statement, expected: str) -> str:
    argument = _one_argument(statement, expected)
    _flags(statement)
    return argument


def _arg(statement: _Statement) -> Arg:
    # BuildKit ignores flags here.
    if not statement.words:
        raise _SyntaxProblem("ARG has no argument; expected ARG NAME or ARG NAME=DEFAULT")
    items: list[tuple[str, str | None]] = []
    for word in statement.words:
        name, equals, default = word.partition("=")
        if not name:
            raise _SyntaxProblem(f"ARG has no name in {_shown(word)}; expected NAME=DEFAULT")
        items.append((name, default if equals else None))
    return Arg(statement.line, tuple(items))


def _read_pairs(keyword: str, text: str, escape: str) -> list[tuple[str, str]]:
    words = _quoted_words(text, escape)
    if words and "=" not in words[0]:
        # The old format has one name, and the rest of the line as its value.
        name, *value = _WHITE_SPACE.split(text, maxsplit=1)
        if not value:
            raise _SyntaxProblem(
                f"{keyword} has the name {_shown(name)} without a value; expected {keyword} NAME=VALUE"
            )
        return [(name, value[0])]
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise _SyntaxProblem(
                f"{keyword} has {_shown(word)} without '='; expected NAME=VALUE, with quotes around a value that "
                "contains spaces"
            )
        pairs.append((name, text))
    return pairs


def _pairs(statement: _Statement) -> tuple[tuple[str, str], ...]:
    keyword, pairs = statement.keyword, statement.pairs
    _flags(statement)
    if not pairs:
        raise _SyntaxProblem(f"{keyword} has no argument; expected {keyword} NAME=VALUE")
    if any(not name for name, _ in pairs):
        raise _SyntaxProblem(f"{keyword} has a value without a name; expected NAME=VALUE")
    return tuple(pairs)


def _run(statement: _Statement) -> Run:
    flags = _flags(statement, texts=("network", "security"), lists=("mount", "device"))
    mounts: list[Mount] = []
    for text in flags.texts.get("mount", []):
        try:
            mounts.append(read_mount(text))
        except MountError as error:
            raise _SyntaxProblem(f"--mount={_shown(text)} of RUN: {error}") from None
    for name, allowed in (("network", ("default", "none", "host")), ("security", ("sandbox", "insecure"))):
        value = flags.text(name)
        if value is not None and value not in allowed:
            raise _SyntaxProblem(f"the flag --{name} of RUN is {_shown(value)}; expected {', '.join(allowed)}")
    command = statement.command
    if statement.is_json and not command:
        raise _SyntaxProblem('RUN has an empty command; expected RUN COMMAND or RUN ["PROGRAM", "ARGUMENT"]')
    is_heredoc = bool(statement.heredocs) and isinstance(command, str) and _heredoc_mark(command) is not None
    return Run(
        statement.line,
        command,
        tuple(statement.heredocs),
        tuple(mounts),
        flags.text("network"),
        flags.text("security"),
        tuple(flags.texts.get("device", [])),
        is_heredoc,
    )


def _copy(statement: _Statement) -> Copy:
    kind: Literal["COPY", "ADD"] = "COPY" if statement.keyword == "COPY" else "ADD"
    if len(statement.words) < 2:
        raise _SyntaxProblem(
            f"{kind} has {_count(len(statement.words), 'argument')}; expected {kind} SOURCE... DESTINATION"
        )
    if kind == "COPY":
        flags = _flags(statement, ("chown", "from", "chmod"), ("exclude",), ("link", "parents"))
    else:
        flags = _flags(statement, ("chown", "chmod", "checksum"), ("exclude",), ("link", "keep-git-dir", "unpack"))
    *sources, destination = statement.words
    if _is_heredoc(destination):
        raise _SyntaxProblem(f"{kind} has the heredoc {_shown(destination)} as its destination; expected a path")
    contents = {heredoc.name: heredoc for heredoc in statement.heredocs}
    paths: list[str] = []
    inline: list[Heredoc] = []
    for source in sources:
        mark = _heredoc_mark(source) if _is_heredoc(source) else None
        if mark is None:
            paths.append(source)
        else:
            written = contents[mark.name].written if mark.name in contents else ""
            inline.append(mark.heredoc(written))
    return Copy(
        statement.line,
        kind,
        tuple(paths),
        destination,
        tuple(inline),
        flags.text("from") or None,
        flags.text("chown") or None,
        flags.text("chmod") or None,
        flags.booleans.get("parents", False),
        tuple(flags.texts.get("exclude", [])),
        flags.booleans.get("unpack"),
    )


def _is_heredoc(word: str) -> bool:
    try:
        return _heredoc_mark(word) is not None
    except _SyntaxProblem:
        return False


def _without_flags(statement: _Statement) -> _Statement:
    _flags(statement)
    return statement


def _shell(statement: _Statement) -> Shell:
    _flags(statement)
    if not statement.is_json or not statement.words:
        raise _SyntaxProblem(
            f'SHELL is {_shown(statement.rest)}; expected a JSON array, for example SHELL ["/bin/bash", "-c"]'
        )
    return Shell(statement.line, tuple(statement.words))


def _healthcheck(statement: _Statement) -> Healthcheck:
    if not statement.words:
        raise _SyntaxProblem("HEALTHCHECK has no argument; expected HEALTHCHECK CMD COMMAND or HEALTHCHECK NONE")
    kind, *words = statement.words
    if kind.upper() == "NONE":
        if words:
            raise _SyntaxProblem("HEALTHCHECK NONE has arguments; remove them, or write HEALTHCHECK CMD COMMAND")
        return Healthcheck(statement.line, None)
    durations = ("interval", "timeout", "start-period", "start-interval")
    flags = _flags(statement, texts=(*durations, "retries"))
    if kind.upper() != "CMD":
        raise _SyntaxProblem(f"HEALTHCHECK has the type {_shown(kind)}; expected CMD or NONE")
    if not words:
        raise _SyntaxProblem("HEALTHCHECK CMD has no command; add one")
    interval, timeout, start_period, _ = (_duration(name, flags.text(name) or "") for name in durations)
    retries = _retries(flags.text("retries") or "")
    command = tuple(words) if statement.is_json else " ".join(words)
    return Healthcheck(statement.line, command, interval, timeout, start_period, retries)


def _duration(flag: str, text: str) -> float | None:
    """Return the seconds of a duration of Go, such as `1m30s`; None for the default."""
    unsigned = text.removeprefix("+") if text.startswith("+") else text.removeprefix("-")
    if text == "" or unsigned == "0":
        return None
    nanoseconds = 0
    at = 0
    while match := _DURATION.match(unsigned, at):
        whole, _, fraction = match[1].partition(".")
        # Longer texts overflow, and their conversion would be slow.
        unit = _NANOSECONDS[match[2]]
        whole, fraction = whole.lstrip("0"), fraction[:18]
        nanoseconds += int(whole[:20] or "0") * unit + int(fraction or "0") * unit // 10 ** len(fraction)
        at = match.end()
    if at == 0 or at < len(unsigned) or nanoseconds > _LONGEST_DURATION:
        raise _SyntaxProblem(f"the flag --{flag} of HEALTHCHECK is {_shown(text)}; expected a duration such as 1m30s")
    if nanoseconds and (text.startswith("-") or nanoseconds < _NANOSECONDS["ms"]):
        raise _SyntaxProblem(f"the flag --{flag} of HEALTHCHECK is {_shown(text)}; expected at least 1ms")
    return nanoseconds / 10**9 or None


def _retries(text: str) -> int | None:
    if text == "":
        return None
    if re.fullmatch(r"\+?0*[0-9]{1,10}|-0+", text) and int(text) <= _MOST_RETRIES:
        return int(text) or None
    raise _SyntaxProblem(f"the flag --retries of HEALTHCHECK is {_shown(text)}; expected a number from 0")


def _checked(statement: _Statement) -> Checked:
    return Checked(statement.line, statement.keyword)


def _expose(statement: _Statement) -> Checked:
    if not statement.words:
        raise _SyntaxProblem("EXPOSE has no argument; expected EXPOSE PORT or EXPOSE PORT/PROTOCOL")
    _flags(statement)
    return _checked(statement)


def _volume(statement: _Statement) -> Checked:
    _flags(statement)
    if not statement.words or any(not path.strip(SPACES) for path in statement.words):
        raise _SyntaxProblem("VOLUME has no path or an empty one; expected VOLUME PATH")
    return _checked(statement)


def _on_build(statement: _Statement) -> OnBuild:
    child = statement.child
    if child is None:
        raise _SyntaxProblem("ONBUILD has no argument; expected ONBUILD INSTRUCTION")
    _flags(statement)
    if child.keyword in ("ONBUILD", "FROM", "MAINTAINER"):
        raise _SyntaxProblem(f"ONBUILD cannot contain {child.keyword}; write another instruction")
    text = re.sub(r"(?i)^[\t\n\f\r ]*ONBUILD[\t\n\f\r ]*", "", statement.text)
    text += "".join(f"\n{heredoc.written}{heredoc.name}" for heredoc in statement.heredocs)
    return OnBuild(statement.line, text)


def _maintainer(statement: _Statement) -> Checked:
    _argument_alone(statement, "MAINTAINER NAME")
    return _checked(statement)


def _stop_signal(statement: _Statement) -> Checked:
    # BuildKit ignores flags here.
    _one_argument(statement, "STOPSIGNAL SIGNAL")
    return _checked(statement)


def _label(statement: _Statement) -> Checked:
    _pairs(statement)
    return _checked(statement)


_READERS: Final[dict[str, Callable[[_Statement], Instruction]]] = {
    "ADD": _copy,
    "ARG": _arg,
    "CMD": lambda statement: Cmd(statement.line, _without_flags(statement).command),
    "COPY": _copy,
    "ENTRYPOINT": lambda statement: Entrypoint(statement.line, _without_flags(statement).command),
    "ENV": lambda statement: Env(statement.line, _pairs(statement)),
    "EXPOSE": _expose,
    "HEALTHCHECK": _healthcheck,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "ONBUILD": _on_build,
    "RUN": _run,
    "SHELL": _shell,
    "STOPSIGNAL": _stop_signal,
    "USER": lambda statement: User(statement.line, _argument_alone(statement, "USER NAME[:GROUP]")),
    "VOLUME": _volume,
    "WORKDIR": lambda statement: Workdir(statement.line, _argument_alone(statement, "WORKDIR PATH")),
}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")

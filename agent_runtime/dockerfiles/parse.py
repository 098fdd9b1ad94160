"""Parses a Dockerfile as BuildKit's frontend does. Pure: every error becomes a Problem with its line.

Reference: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_runtime.dockerfiles.instructions import (
    Arg,
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
    Other,
    Problem,
    Run,
    Shell,
    Stage,
    User,
    Workdir,
)
from agent_runtime.dockerfiles.words import WordError, expand

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_DIRECTIVES = ("syntax", "escape", "check")
_HEREDOC = re.compile(r"(\d*)<<(-?)([^<]+)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAGE = re.compile(r"[a-z][a-z0-9-_.]*", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_WITHOUT_EFFECT = ("LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL", "MAINTAINER")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_KNOWN = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "ONBUILD", "RUN", "SHELL", "USER"),
    *("WORKDIR", *_WITHOUT_EFFECT),
)
_FLAGS: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount", "network", "security", "device"}),
    "COPY": frozenset({"from", "chown", "chmod", "link", "parents", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "keep-git-dir", "checksum", "unpack"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}
_MOUNT_TYPES = ("bind", "cache", "secret", "tmpfs", "ssh")
_IGNORED_MOUNT_KEYS = frozenset({"readonly", "ro", "readwrite", "rw", "sharing", "size"})


class _Bad(Exception):
    """An instruction that cannot be read."""


@dataclass(frozen=True)
class _Written:
    """An instruction with its heredocs."""

    line: int
    name: str
    rest: str
    heredocs: tuple[Heredoc, ...]


def parse(text: str) -> Dockerfile:
    """Return the parsed Dockerfile. Any text is accepted; what is wrong in it is in `problems`."""
    return _Parser(text).result()


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = text.removeprefix("\ufeff").split("\n")
        if self._lines[-1] == "":
            self._lines.pop()
        self._escape = "\\"
        self._problems: list[Problem] = []
        self._global_args: list[Arg] = []
        self._stages: list[tuple[From, list[Instruction]]] = []

    def result(self) -> Dockerfile:
        first = self._directives()
        for written in self._instructions(first):
            try:
                self._add(written)
            except _Bad as bad:
                self._problems.append(Problem(written.line, str(bad)))
        return Dockerfile(
            tuple(self._global_args),
            tuple(Stage(start, tuple(instructions)) for start, instructions in self._stages),
            self._escape,
            tuple(self._problems),
        )

    def _directives(self) -> int:
        """Read the parser directives; return the number of lines that they take."""
        seen: set[str] = set()
        for number, line in enumerate(self._lines):
            found = _DIRECTIVE.fullmatch(line.strip())
            if found is None or found[1].lower() not in _DIRECTIVES or found[1].lower() in seen:
                return number
            seen.add(found[1].lower())
            if found[1].lower() == "escape":
                if found[2] not in ("\\", "`"):
                    self._problems.append(Problem(number + 1, f"escape={found[2]} is invalid; expected \\ or `"))
                else:
                    self._escape = found[2]
        return len(self._lines)

    def _instructions(self, position: int) -> Iterator[_Written]:
        while position < len(self._lines):
            begin = position + 1
            line = self._lines[position].rstrip("\r").lstrip()
            position += 1
            if line.startswith("#"):
                continue
            line, goes_on = self._continued(line)
            while goes_on and position < len(self._lines):
                following = self._lines[position].rstrip("\r")
                position += 1
                # Comments and empty lines inside an instruction are left out.
                if following.lstrip().startswith("#") or not following.strip():
                    continue
                following, goes_on = self._continued(following)
                line += following
            if not line.strip():
                continue
            name, rest = _first_word(line)
            heredocs: tuple[Heredoc, ...] = ()
            inner = _first_word(rest)[0].upper() if name.upper() == "ONBUILD" else name.upper()
            if inner in _WITH_HEREDOC and "<<" in rest and _json_list(_without_flags(rest)) is None:
                try:
                    heredocs, position = self._heredocs(rest, position, begin)
                except _Bad as bad:
                    self._problems.append(Problem(begin, str(bad)))
                    return
            yield _Written(begin, name, rest, heredocs)

    def _continued(self, line: str) -> tuple[str, bool]:
        """Return a line without its continuation character, and whether it had one. A doubled one is none."""
        stripped = line.rstrip(" \t")
        if stripped.endswith(self._escape) and not stripped.endswith(self._escape * 2):
            return stripped[:-1], True
        return line, False

    def _heredocs(self, rest: str, position: int, begin: int) -> tuple[tuple[Heredoc, ...], int]:
        found = []
        for word in _words(rest, self._escape):
            match = _HEREDOC.fullmatch(word)
            if match is None:
                continue
            try:
                name = expand(match[3], {}, "\\")
            except WordError:
                continue
            if not name:
                continue
            content = []
            while True:
                if position >= len(self._lines):
                    raise _Bad(f"the text <<{name} has no end; end it with a line that is exactly {name}")
                line = self._lines[position]
                position += 1
                bare = line.rstrip("\r")
                if (bare.lstrip("\t") if match[2] else bare) == name:
                    break
                content.append((line.lstrip("\t") if match[2] else line) + "\n")
            found.append(Heredoc(name, "".join(content), name == match[3]))
        return tuple(found), position

    # Instructions

    def _add(self, written: _Written) -> None:
        name, line = written.name.upper(), written.line
        if name not in _KNOWN:
            raise _Bad(f"unknown instruction {written.name!r}; expected one of {', '.join(sorted(_KNOWN))}")
        flags, rest = self._flags(name, written.rest)
        if name == "FROM":
            self._from(line, flags, rest)
            return
        if name == "ARG":
            arg = Arg(
                line, tuple(self._declared(word) for word in self._needed(_words(rest, self._escape), "ARG NAME"))
            )
            if self._stages:
                self._stages[-1][1].append(arg)
            else:
                self._global_args.append(arg)
            return
        if not self._stages:
            raise _Bad(f"{name} stands before the first FROM; only ARG may")
        self._stages[-1][1].append(self._instruction(name, line, flags, rest, written.heredocs))

    def _instruction(
        self, name: str, line: int, flags: list[tuple[str, str]], rest: str, heredocs: tuple[Heredoc, ...]
    ) -> Instruction:
        if not rest.strip() and name not in ("CMD", "RUN", "ENTRYPOINT"):
            raise _Bad(f"{name} has no argument")
        match name:
            case "RUN":
                return self._run(line, flags, rest, heredocs)
            case "COPY" | "ADD":
                return self._copy(name, line, flags, rest, heredocs)
            case "ENV":
                return Env(line, tuple(self._pairs(rest)))
            case "WORKDIR":
                return Workdir(line, rest.strip())
            case "USER":
                return User(line, rest.strip())
            case "SHELL":
                words = _json_list(rest)
                if not words:
                    raise _Bad('SHELL needs its words as a JSON list, such as ["/bin/bash", "-c"]')
                return Shell(line, tuple(words))
            case "ENTRYPOINT":
                return Entrypoint(line, _command(rest))
            case "CMD":
                return Cmd(line, _command(rest))
            case "HEALTHCHECK":
                return self._healthcheck(line, flags, rest)
            case "ONBUILD":
                inner = _first_word(rest)[0].upper()
                if inner in ("ONBUILD", "FROM", "MAINTAINER"):
                    raise _Bad(f"ONBUILD {inner} is not allowed")
                text = rest + "".join(f"\n{heredoc.content}{heredoc.name}" for heredoc in heredocs)
                return OnBuild(line, text)
        return Other(line, name, rest.strip())

    def _flags(self, name: str, rest: str) -> tuple[list[tuple[str, str]], str]:
        found = []
        allowed = _FLAGS.get(name)
        if allowed is None:
            return [], rest
        while (text := rest.lstrip()).startswith("--"):
            word, rest = _first_quoted(text, self._escape)
            if word == "--":
                break
            flag, equals, value = word[2:].partition("=")
            if flag not in allowed:
                raise _Bad(
                    f"{name} has no flag --{flag}; it has {', '.join(f'--{known}' for known in sorted(allowed))}"
                )
            if not equals and flag not in ("link", "parents", "keep-git-dir", "unpack"):
                raise _Bad(f"--{flag} needs a value: --{flag}=…")
            found.append((flag, value if equals else "true"))
        return found, rest.lstrip()

    def _from(self, line: int, flags: list[tuple[str, str]], rest: str) -> None:
        words = rest.split()
        platform = dict(flags).get("platform")
        if len(words) == 3 and words[1].upper() == "AS":
            if not _STAGE.fullmatch(words[2]):
                raise _Bad(f"{words[2]!r} cannot be a stage's name; use letters, digits and -_.")
            self._stages.append((From(line, words[0], words[2], platform), []))
        elif len(words) == 1:
            self._stages.append((From(line, words[0], None, platform), []))
        else:
            raise _Bad("expected FROM IMAGE, or FROM IMAGE AS NAME")

    def _needed(self, words: list[str], usage: str) -> list[str]:
        if not words:
            raise _Bad(f"expected {usage}")
        return words

    def _declared(self, word: str) -> tuple[str, str | None]:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise _Bad(f"{name!r} cannot be the name of a variable")
        return name, value if equals else None

    def _pairs(self, rest: str) -> list[tuple[str, str]]:
        words = _words(rest, self._escape)
        if "=" not in words[0]:
            parts = rest.split(None, 1)
            if len(parts) < 2:
                raise _Bad("ENV needs a value: ENV NAME=VALUE")
            return [(parts[0], parts[1].rstrip())]
        pairs = []
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise _Bad(f"{word!r} has no =; write NAME=VALUE, with quotes around blanks")
            if not name:
                raise _Bad(f"{word!r} has no name before =")
            pairs.append((name, value))
        return pairs

    def _run(self, line: int, flags: list[tuple[str, str]], rest: str, heredocs: tuple[Heredoc, ...]) -> Run:
        mounts = tuple(_mount(value) for flag, value in flags if flag == "mount")
        given = dict(flags)
        if "device" in given:
            raise _Bad("RUN --device is not supported; remove it")
        command = _command(rest)
        words = _words(command, self._escape) if isinstance(command, str) else []
        if len(words) == len(heredocs) == 1 and _HEREDOC.fullmatch(words[0]):
            command = ""  # the text is the script
        elif not command or (isinstance(command, str) and not command.strip()):
            raise _Bad("RUN has no command")
        return Run(line, command, heredocs, mounts, given.get("network"), given.get("security"))

    def _copy(
        self, name: str, line: int, flags: list[tuple[str, str]], rest: str, heredocs: tuple[Heredoc, ...]
    ) -> Copy:
        words = _json_list(rest)
        if words is None:
            words = rest.split()
        if len(words) < 2:
            raise _Bad(f"{name} needs a source and a destination")
        inline = {heredoc.name: heredoc for heredoc in heredocs}
        sources, texts = [], []
        for word in words[:-1]:
            match = _HEREDOC.fullmatch(word)
            heredoc = None
            if match is not None:
                try:
                    heredoc = inline.get(expand(match[3], {}, "\\"))
                except WordError:
                    heredoc = None
            if heredoc is not None:
                texts.append(heredoc)
            else:
                sources.append(word)
        given = dict(flags)
        return Copy(
            line=line,
            kind="ADD" if name == "ADD" else "COPY",
            sources=tuple(sources),
            destination=words[-1],
            inline=tuple(texts),
            from_=given.get("from"),
            chown=given.get("chown"),
            chmod=given.get("chmod"),
            parents=_truth(given.get("parents")),
            excludes=tuple(value for flag, value in flags if flag == "exclude"),
            unpack=None if "unpack" not in given else _truth(given["unpack"]),
        )

    def _healthcheck(self, line: int, flags: list[tuple[str, str]], rest: str) -> Healthcheck:
        kind, command = _first_word(rest)
        if kind.upper() == "NONE":
            return Healthcheck(line, None)
        if kind.upper() != "CMD" or not command.strip():
            raise _Bad("expected HEALTHCHECK CMD COMMAND, or HEALTHCHECK NONE")
        given = dict(flags)
        times = {
            flag.replace("-", "_"): _seconds(flag, given[flag])
            for flag in ("interval", "timeout", "start-period", "start-interval")
            if flag in given
        }
        retries = given.get("retries")
        if retries is not None and not retries.isdigit():
            raise _Bad(f"--retries={retries}: expected a whole number")
        return Healthcheck(line, _command(command), **times, retries=None if retries is None else int(retries))


def _first_word(text: str) -> tuple[str, str]:
    parts = text.strip().split(None, 1)
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[0] if parts else "", "")


def _without_flags(rest: str) -> str:
    while (text := rest.lstrip()).startswith("--"):
        rest = _first_quoted(text, "\\")[1]
    return text


def _first_quoted(text: str, escape: str) -> tuple[str, str]:
    """Split off the first word, in which quotes and escapes protect blanks."""
    quote, position = "", 0
    while position < len(text):
        character = text[position]
        if character == escape:
            position += 1
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character.isspace():
            break
        position += 1
    return text[:position], text[position:]


def _words(text: str, escape: str) -> list[str]:
    """Split into words; quotes and escapes stay in them."""
    words = []
    while text := text.lstrip():
        word, text = _first_quoted(text, escape)
        words.append(word)
    return words


def _json_list(text: str) -> list[str] | None:
    """Return a JSON list of texts; None if the text is anything else."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else None


def _command(rest: str) -> Command:
    words = _json_list(rest)
    return tuple(words) if words is not None else rest.strip()


def _truth(value: str | None) -> bool:
    return value is not None and value.lower() not in ("false", "0", "f")


def _seconds(flag: str, written: str) -> float:
    parts = _DURATION.findall(written)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != written:
        raise _Bad(f"--{flag}={written}: expected a duration such as 30s or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _mount(written: str) -> Mount:
    values: dict[str, Any] = {"type": "bind"}
    for entry in written.split(","):
        key, equals, value = entry.partition("=")
        key = key.strip().lower()
        match key:
            case "type":
                if value not in _MOUNT_TYPES:
                    raise _Bad(f"--mount=type={value} is not supported; expected one of {', '.join(_MOUNT_TYPES)}")
                values["type"] = value
            case "target" | "dst" | "destination":
                values["target"] = value
            case "source" | "src":
                values["source"] = value
            case "from":
                values["from_"] = value
            case "id" | "env":
                values[key] = value
            case "required":
                values["required"] = not equals or _truth(value)
            case "mode" | "uid" | "gid":
                try:
                    values[key] = int(value, 8 if key == "mode" else 10)
                except ValueError:
                    raise _Bad(f"--mount: {key}={value}: expected a number") from None
            case _ if key in _IGNORED_MOUNT_KEYS:
                pass
            case _:
                raise _Bad(f"--mount has no key {key!r}")
    if values["type"] in ("bind", "cache", "tmpfs") and not values.get("target"):
        raise _Bad(f"--mount=type={values['type']} needs a target")
    return Mount(**values)

"""Expansion of variables in a Dockerfile's words, as BuildKit's shell lexer does it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent_runtime.dockerfiles.glob import Step, ends, literal, many, one

SPACES: Final = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a" + (
    "\u2028\u2029\u202f\u205f\u3000"
)
"""White space of Go's `unicode.IsSpace`. Python's `str.isspace` has four more characters."""
DEFAULT_ESCAPE: Final = "\\"
_SPECIAL_PARAMETERS: Final = "@*#?-$!0"
_HEREDOC_SPACES: Final = "\t\r "
_NESTING: Final = 100
"""Limit of substitutions within substitutions; more would exhaust Python's stack."""
_CHARACTERS: Final = 4 << 20
"""Limit of an expanded text. A few variables that each contain the one before twice would exhaust memory."""
_COMPARISONS: Final = 10**7
"""Limit of the comparisons of characters in `${name#pattern}` and the like, which take some seconds."""


class WordError(ValueError):
    """A word with a wrong substitution or an open quote."""


def expand(word: str, variables: Mapping[str, str], escape: str = DEFAULT_ESCAPE) -> str:
    """Expand variables, and remove quotes and escapes. Unset variables are empty.

    Raises WordError.
    """
    return _Lexer(word, variables, escape).read_all()


def expand_heredoc(content: str, variables: Mapping[str, str]) -> str:
    """Expand the content of a heredoc of COPY or ADD: quotes are ordinary characters, and `\\` escapes.

    Raises WordError.
    """
    return _Lexer(content, variables, DEFAULT_ESCAPE, quotes=False).read_all()


def split_words(text: str, raw_quotes: bool = False, raw_escapes: bool = False) -> list[str]:
    """Split at white space that is not quoted, without expansion; `raw_` keeps the quotes and escapes.

    Raises WordError.
    """
    lexer = _Lexer(text, {}, DEFAULT_ESCAPE, keep_unset=True, raw_quotes=raw_quotes, raw_escapes=raw_escapes)
    lexer.read_all()
    return lexer.words.finish()


@dataclass
class _Words:
    """The words read so far."""

    done: list[str] = field(default_factory=list)
    current: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        for character in text:
            if character not in SPACES:
                self.current.append(character)
            else:
                self.end_word()

    def add_quoted(self, text: str) -> None:
        self.current.append(text)

    def end_word(self) -> None:
        if word := "".join(self.current):
            self.done.append(word)
        self.current = []

    def finish(self) -> list[str]:
        self.end_word()
        return self.done


@dataclass
class _Lexer:
    text: str
    variables: Mapping[str, str]
    escape: str
    quotes: bool = True
    raw_quotes: bool = False
    raw_escapes: bool = False
    keep_unset: bool = False
    at: int = 0
    depth: int = 0
    characters: int = 0
    words: _Words = field(default_factory=_Words)

    def read_all(self) -> str:
        try:
            return self.read_until("", self.raw_escapes, in_pattern=False, words=self.words)
        except WordError as error:
            shown = self.text if len(self.text) <= 200 else self.text[:200] + "…"
            raise WordError(f"{error} in {shown!r}") from None

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def next(self) -> str:
        character = self.peek()
        self.at += len(character)
        return character

    def count(self, part: str) -> None:
        """Raise WordError if the parts so far are too long together."""
        self.characters += len(part)
        if self.characters > _CHARACTERS:
            raise WordError(f"the expanded text is longer than {_CHARACTERS} characters")

    def read_until(self, stop: str, raw_escapes: bool, in_pattern: bool, words: _Words | None = None) -> str:
        """Read up to `stop`, or to the end if it is empty. In patterns, quoted escapes are doubled."""
        words = _Words() if words is None else words
        before, self.raw_escapes = self.raw_escapes, raw_escapes
        result: list[str] = []
        try:
            while character := self.peek():
                if character == stop:
                    self.next()
                    return "".join(result)
                if character == "$":
                    part = self.dollar()
                    words.add(part)
                elif character == "<":
                    part = self.heredoc_mark()
                    words.add_quoted(part)
                elif self.quotes and character in "'\"":
                    part = self.single_quoted(in_pattern) if character == "'" else self.double_quoted(in_pattern)
                    words.add_quoted(part)
                elif character == self.escape:
                    self.next()
                    escaped = self.next()
                    part = (character if raw_escapes else "") + escaped
                    words.add_quoted(part)
                else:
                    part = self.next()
                    words.add(part)
                self.count(part)
                result.append(part)
        finally:
            self.raw_escapes = before
        if stop:
            raise WordError(f"{stop!r} is missing")
        return "".join(result)

    def heredoc_mark(self) -> str:
        start = self.at
        self.next()
        if self.peek() == "<":
            self.next()
            # The name may follow after white space, and belongs to the same word.
            while self.peek() and self.peek() in _HEREDOC_SPACES:
                self.next()
        return self.text[start : self.at]

    def single_quoted(self, in_pattern: bool) -> str:
        quote = self.next()
        end = self.text.find(quote, self.at)
        if end < 0:
            self.at = len(self.text)
            raise WordError("the closing single quote is missing")
        content = self.text[self.at : end]
        self.at = end + 1
        if in_pattern:
            content = content.replace(self.escape, self.escape * 2)
        return f"{quote}{content}{quote}" if self.raw_quotes else content

    def double_quoted(self, in_pattern: bool) -> str:
        quote = self.next()
        result = [quote] if self.raw_quotes else []
        while character := self.peek():
            if character == "$":
                part = self.dollar()
                self.count(part)
                result.append(part)
                continue
            self.next()
            if character == quote:
                return "".join([*result, quote] if self.raw_quotes else result)
            if character == self.escape:
                escaped = self.peek()
                if not escaped:
                    break
                if escaped in ('"', "$", self.escape):
                    self.next()
                    result.append(character * self.raw_escapes + escaped)
                    continue
                if self.raw_escapes and (in_pattern or not self.raw_quotes):
                    result.append(character)
            result.append(character)
        raise WordError("the closing double quote is missing")

    def name(self) -> str:
        start = self.at
        first = self.peek()
        if first.isdecimal():
            while self.peek().isdecimal():
                self.next()
        elif first and first in _SPECIAL_PARAMETERS:
            self.next()
        else:
            while (character := self.peek()) and (character.isalpha() or character.isdecimal() or character == "_"):
                self.next()
        return self.text[start : self.at]

    def dollar(self) -> str:
        """Read `$name` or `${…}`."""
        self.next()
        if self.peek() != "{":
            name = self.name()
            if not name:
                return "$"
            if name not in self.variables and self.keep_unset:
                return f"${name}"
            return self.variables.get(name, "")
        self.depth += 1
        if self.depth > _NESTING:
            raise WordError(f"more than {_NESTING} substitutions are nested")
        try:
            return self.braces()
        finally:
            self.depth -= 1

    def braces(self) -> str:
        self.next()
        if not self.peek():
            raise WordError("'}' is missing")
        if self.peek() in "{}:":
            raise WordError("a substitution has no variable name; expected ${name}")
        name = self.name()
        value = self.variables.get(name)
        operator = self.next()
        if operator == "}":
            return f"${{{name}}}" if value is None and self.keep_unset else value or ""
        if operator == "/":
            return self.replace(name, value)
        empty_is_unset = operator == ":"
        modifier = operator
        if empty_is_unset:
            operator = self.next()
            modifier += operator
        if operator in ("#", "%") and empty_is_unset:
            raise WordError(f"the modifier {modifier!r} is not supported")
        if not empty_is_unset and operator not in ("+", "-", "?", "#", "%"):
            raise WordError(f"the modifier {modifier!r} is not supported" if modifier else "'}' is missing")
        word = self.operand("}", raw_escapes=operator in ("#", "%"), in_pattern=operator in ("#", "%"))
        if value is None and self.keep_unset:
            return f"${{{name}{modifier}{word}}}"
        is_set = value is not None and not (empty_is_unset and not value)
        if operator == "-":
            return value or "" if is_set else word
        if operator == "+":
            return word if is_set else ""
        if operator == "?":
            if is_set:
                return value or ""
            state = "unset" if value is None else "empty"
            raise WordError(f"{name}: {word or f'is not allowed to be {state}'}")
        if operator in ("#", "%"):
            longest = word.startswith(operator)
            return _trim(value or "", word[longest:], operator == "%", longest)
        raise WordError(f"the modifier {modifier!r} is not supported")

    def operand(self, stop: str, raw_escapes: bool, in_pattern: bool) -> str:
        try:
            return self.read_until(stop, raw_escapes, in_pattern)
        except WordError:
            if not self.peek():
                raise WordError(f"{stop!r} is missing") from None
            raise

    def replace(self, name: str, value: str | None) -> str:
        everywhere = self.peek() == "/"
        if everywhere:
            self.next()
        pattern = self.operand("/", raw_escapes=True, in_pattern=True)
        replacement = self.operand("}", raw_escapes=True, in_pattern=False)
        if value is None and self.keep_unset:
            return f"${{{name}/{pattern}/{replacement}}}"
        _check_comparisons(len(value or "") ** 2 * len(pattern))
        return _replace(value or "", _pattern(pattern), replacement, everywhere)


def _check_comparisons(number: int) -> None:
    if number > _COMPARISONS:
        raise WordError("the value and the pattern are too long")


def _in_line(character: str) -> bool:
    return character != "\n"


def _pattern(pattern: str, backwards: bool = False) -> list[Step]:
    """Return the steps of a shell pattern: `*`, `?` and literals."""
    steps: list[Step] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "*":
            steps.append(many(_in_line))
        elif character == "?":
            steps.append(one(_in_line))
        elif character == "\\":
            escaped = pattern[at : at + 1]
            if escaped == "" or escaped not in "*?\\}/":
                raise WordError(f"the escape '\\{escaped}' in the pattern {pattern!r} is not supported")
            at += 1
            steps.append(literal(escaped))
        else:
            steps.append(literal(character))
    return steps[::-1] if backwards else steps


def _trim(value: str, pattern: str, at_end: bool, longest: bool) -> str:
    """Remove the shortest or longest match from an end of the value."""
    _check_comparisons(len(value) * len(pattern))
    text = value[::-1] if at_end else value
    found = ends(_pattern(pattern, backwards=at_end), text)
    if not found:
        return value
    rest = text[max(found) if longest else min(found) :]
    return rest[::-1] if at_end else rest


def _replace(value: str, pattern: list[Step], replacement: str, everywhere: bool) -> str:
    """Replace the first or every longest match."""
    result: list[str] = []
    at = 0
    previous_end = -1
    while at <= len(value):
        found = ends(pattern, value, at)
        end = max(found, default=-1)
        # An empty match directly after another match does not count.
        if end > at or (end == at and at != previous_end):
            result.append(replacement)
            if not everywhere:
                return "".join(result) + value[end:]
            previous_end = end
        if end > at:
            at = end
        else:
            result.append(value[at : at + 1])
            at += 1
    return "".join(result)

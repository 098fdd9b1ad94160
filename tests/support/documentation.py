"""The code blocks of the documentation, and what each of them needs. docs/testing.md has the rules."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

LANGUAGES = ("sh", "console", "python", "yaml", "json", "toml", "text")
"""Languages of blocks. `text` is for what cannot be run: a drawing, a grammar, a message."""

CLUSTER = "cluster"
NEEDS = {
    CLUSTER: "a cluster: tests/e2e/cluster/test_docs.py runs it",
    "container engine": "Docker or podman, and buildah: tests/integration/containers/test_pages.py runs it",
    "hours": "more time than the test of a page has",
    "kind": "kind and Docker: no test runs it, hack/kind-tests does the same where they are",
    "internet": "a package index, a registry or a paid API",
    "vLLM": "vLLM, which has its own environment: tests/integration/vllm/test_weight_push.py runs it there",
    "verl": "verl in an environment of its own: tests/integration/verl/test_pages.py runs it",
}
"""What a block may need, as in `needs="hours"`, that the test of its page does not have, and which tests run it then.
"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    """The file, from the repository's root."""
    line: int
    """Line of its fence, from 1."""
    language: str
    text: str
    title: str = ""
    """Name of the file that a reader creates from it; empty if it is not a file."""
    needs: str = ""
    exit: int = 0
    """Exit code of its last command."""

    @property
    def place(self) -> str:
        """Return its position, as editors write it."""
        return f"{self.page}:{self.line}"


class WrongBlock(ValueError):
    """A block that lacks a valid description of itself."""


def blocks(page: Path) -> Sequence[Block]:
    """Return all blocks of a page in order. Raises WrongBlock for the first one that breaks a rule."""
    name = str(page.relative_to(REPOSITORY)) if page.is_relative_to(REPOSITORY) else page.name
    return read_blocks(name, page.read_text())


def read_blocks(page: str, markdown: str) -> Sequence[Block]:
    """Like `blocks`, for a text."""
    fences = [token for token in MarkdownIt("commonmark").parse(markdown) if token.type == "fence"]
    return [_block(page, (fence.map or [0])[0] + 1, fence.info, fence.content) for fence in fences]


def _block(page: str, line: int, info: str, text: str) -> Block:
    place = f"{page}:{line}"
    # The site's reader of Markdown takes no other form, and would show the fence as text.
    if not re.fullmatch(r'\w+( \w+="[^"]*")*', info):
        raise WrongBlock(f'{place}: the fence says {info!r}, expected a language and options, as in sh needs="cluster"')
    language, *rest = shlex.split(info)
    options = dict(option.split("=", 1) for option in rest)
    if language not in LANGUAGES:
        raise WrongBlock(f"{place}: is in {language!r}, expected one of {', '.join(LANGUAGES)}")
    if unknown := options.keys() - {"title", "needs", "exit"}:
        raise WrongBlock(f"{place}: has {', '.join(sorted(unknown))}, expected title, needs or exit")
    if (needs := options.get("needs", "")) and needs not in NEEDS:
        raise WrongBlock(f"{place}: needs {needs!r}, expected one of {', '.join(NEEDS)}")
    if needs and language in ("text", "json", "toml"):
        raise WrongBlock(f"{place}: needs {needs!r}, but {language} is never run; leave it out")
    return Block(page, line, language, text, options.get("title", ""), needs, int(options.get("exit", 0)))


def commands(block: Block) -> Sequence[tuple[str, str]]:
    """Return the commands of a `console` block, each with the output that it shows."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            typed, shown = found[-1]
            found[-1] = (typed, f"{shown}{line}\n")
        else:
            raise WrongBlock(f"{block.place}: begins with output; a command begins with '$ '")
    return found


def shows(expected: str, output: str) -> bool:
    """Whether an output equals the shown one. `…` stands for any text, a line `…` for any lines, and blanks count as
    one.
    """
    lines = [_pattern(line) for line in expected.splitlines() if line.strip()]
    found = "".join(f"{' '.join(line.split())}\n" for line in output.splitlines() if line.strip())
    return re.fullmatch("".join(lines), found) is not None


def _pattern(line: str) -> str:
    words = " ".join(line.split())
    if words == "…":
        return r"(?:.*\n)*"
    return ".*".join(re.escape(part) for part in words.split("…")) + r"\n"

"""Each code block of a page says what it is, so that it can be run; and how an output may differ."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rolloutctl.main import Commands
from tests.support.documentation import PAGES, Block, WrongBlock, blocks, commands, read_blocks, shows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_console_block_contains_a_command(page: Path) -> None:
    for block in blocks(page):
        if block.language == "console":
            assert commands(block), f"{block.place} types no command"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    """The site also checks links within docs/, with their anchors. It does not see those of README.md and to examples."""
    for block in MarkdownIt().parse(page.read_text()):
        for token in block.children or ():
            link = str(token.attrs.get("href", ""))
            if link and not link.startswith(("#", "http")):
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


def test_block_is_found_with_its_line_in_any_nesting() -> None:
    page = '# Title\n\n- in a list\n  ```sh needs="hours"\n  nvidia-smi\n  ```\n\n```yaml title="job.yaml"\na: 1\n```\n'
    assert read_blocks("page.md", page) == [
        Block("page.md", 4, "sh", "nvidia-smi\n", needs="hours"),
        Block("page.md", 8, "yaml", "a: 1\n", title="job.yaml"),
    ]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("", "expected a language"),
        ("bash", "expected one of sh"),
        ("sh needs=gpu", "expected a language and options"),
        ('sh needs="luck"', "needs 'luck'"),
        ('sh skip="yes"', "has skip"),
        ('json needs="hours"', "json is never run"),
    ],
)
def test_block_that_would_not_be_run_is_refused_without_a_reason(info: str, message: str) -> None:
    with pytest.raises(WrongBlock, match=f"page.md:3: .*{message}"):
        read_blocks("page.md", f"a\n\n```{info}\ntext\n```\n")


def test_commands_are_distinguished_from_their_output() -> None:
    block = Block("page.md", 1, "console", "$ ls\na\nb\n$ true\n")
    assert commands(block) == [("ls", "a\nb\n"), ("true", "")]
    with pytest.raises(WrongBlock, match="begins with output"):
        commands(Block("page.md", 1, "console", "a\n$ ls\n"))


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("NAME  AGE\nx     …", "NAME        AGE\nx           2h\n"),
        ("first\n…\nlast", "first\nlast\n"),
        ("first\n…\nlast", "first\n1\n2\nlast\n"),
        ("run-… is done", "run-1a2b is done\n"),
    ],
)
def test_variable_parts_of_an_output_are_not_compared(expected: str, output: str) -> None:
    assert shows(expected, output)


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"])), min_size=1))
def test_an_output_is_found_only_in_the_block_that_shows_it(lines: list[str]) -> None:
    output = "\n".join(lines)
    assert shows(output, output)
    assert not shows(output, f"{output}\nand more")


def shown_commands() -> list[tuple[str, str]]:
    """Return place and command of each line of a `text` block that begins with rolloutctl, without what explains it."""
    return [
        (block.place, re.split(r"  +| #", line)[0])
        for page in PAGES
        for block in blocks(page)
        for line in block.text.splitlines()
        if block.language == "text" and line.startswith("rolloutctl ")
    ]


def unknown_words(command: str) -> list[str]:
    """Return the names of commands and the options that rolloutctl lacks. `a|b` are two commands, `[…]` may be left out."""
    words = re.sub(r"[\[\]]", "", command).split()[1:]
    found: list[Any] = [Commands()]
    while hasattr(found[0], "list_commands"):
        names = words.pop(0).split("|")
        found, groups = [found[0].get_command(None, name) for name in names], found
        if None in found:
            return [name for name in names if groups[0].get_command(None, name) is None]
    known = {option for one in found for param in one.params for option in (*param.opts, *param.secondary_opts)}
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize(("place", "command"), shown_commands())
def test_command_that_is_shown_as_text_exists_with_its_options(place: str, command: str) -> None:
    assert unknown_words(command) == [], place


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("rolloutctl veiw", ["veiw"]),
        ("rolloutctl layers ls|gone", ["gone"]),
        ("rolloutctl view [WHERE] --prot 80 --open", ["--prot"]),
    ],
)
def test_unknown_words_of_a_command_are_found(command: str, unknown: list[str]) -> None:
    assert unknown_words(command) == unknown


def test_python_of_the_readme_is_a_script() -> None:
    """Pages may use `await` alone, as in a notebook. The README's code, which newcomers copy first, must run as a file."""
    for block in blocks(PAGES[0]):
        if block.language == "python":
            compile(block.text, block.place, "exec")

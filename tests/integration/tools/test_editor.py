"""The editor on real files."""

import os
import shutil
from typing import Any

import pytest

from agent_runtime.tools.base import ToolError


async def edit(bench: Any, command: Any, path: Any = "a.py", **arguments: Any) -> Any:
    return (await bench.use("editor", command=command, path=path, **arguments)).content


async def test_file_is_created_changed_and_viewed(bench: Any) -> None:
    await edit(bench, "create", file_text="one\ntwo\nthree\n")
    shown = await edit(bench, "str_replace", old_str="two", new_str="2\n2b")
    assert "     2\t2\n     3\t2b\n     4\tthree" in shown
    await edit(bench, "insert", insert_line=0, new_str="zero")
    assert (bench.folder / "a.py").read_text() == "zero\none\n2\n2b\nthree\n"
    assert await edit(bench, "view", view_range=[2, 3]) == "     2\tone\n     3\t2"
    assert await edit(bench, "view", view_range=[5, -1]) == "     5\tthree"


async def test_undo_reverts_each_edit_and_the_creation(bench: Any) -> None:
    await edit(bench, "create", file_text="1\n")
    await edit(bench, "str_replace", old_str="1", new_str="2")
    await edit(bench, "create", file_text="3\n")
    seen = []
    for _ in range(2):
        await edit(bench, "undo_edit")
        seen.append((bench.folder / "a.py").read_text())
    assert seen == ["2\n", "1\n"]
    await edit(bench, "undo_edit")
    assert not (bench.folder / "a.py").exists()
    with pytest.raises(ToolError, match="no edit"):
        await edit(bench, "undo_edit")


async def test_undo_history_is_bounded_and_is_not_graded(bench: Any) -> None:
    for number in range(25):
        await edit(bench, "create", file_text=f"{number}\n")
    assert os.listdir(bench.folder) == ["a.py"]
    [history] = (bench.root / "tmp" / ".editor-undo").iterdir()
    assert len(list(history.iterdir())) == 20
    for _ in range(20):
        await edit(bench, "undo_edit")
    assert (bench.folder / "a.py").read_text() == "4\n"


async def test_a_replacement_fails_when_its_text_is_missing_or_not_unique(bench: Any) -> None:
    await edit(bench, "create", file_text="x = 1\ny = 1\n")
    with pytest.raises(ToolError, match=r"occurs 2 times, first at lines 1 and 2"):
        await edit(bench, "str_replace", old_str="= 1", new_str="= 2")
    with pytest.raises(ToolError, match="does not occur"):
        await edit(bench, "str_replace", old_str="z", new_str="= 2")
    assert (bench.folder / "a.py").read_text() == "x = 1\ny = 1\n"


async def test_bytes_that_are_not_utf8_are_kept_by_an_edit(bench: Any) -> None:
    (bench.folder / "a.py").write_bytes(b"caf\xe9 = 1\nb = 2\n")
    assert "caf\\xe9" in await edit(bench, "view")
    await edit(bench, "str_replace", old_str="b = 2", new_str="ü = 3")
    assert (bench.folder / "a.py").read_bytes() == b"caf\xe9 = 1\n" + "ü = 3\n".encode()


async def test_windows_line_ends_and_the_mode_are_kept_by_an_edit(bench: Any) -> None:
    (bench.folder / "a.py").write_bytes(b"a\r\nb\r\nc\r\n")
    (bench.folder / "a.py").chmod(0o755)
    await edit(bench, "str_replace", old_str="a\nb", new_str="x\ny")
    assert (bench.folder / "a.py").read_bytes() == b"x\r\ny\r\nc\r\n"
    assert (bench.folder / "a.py").stat().st_mode & 0o777 == 0o755


async def test_editing_through_a_link_keeps_the_link(bench: Any) -> None:
    (bench.folder / "real.py").write_text("a\n")
    (bench.folder / "a.py").symlink_to("real.py")
    await edit(bench, "str_replace", old_str="a", new_str="b")
    assert (bench.folder / "a.py").is_symlink()
    assert (bench.folder / "real.py").read_text() == "b\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"x" * (1 << 20) + b"y", "1048577 bytes, more than"), (b"ELF\0\1", "binary"), (None, "does not exist")],
)
async def test_file_that_cannot_be_edited_gives_the_reason(content: Any, complaint: Any, bench: Any) -> None:
    if content is not None:
        (bench.folder / "a.py").write_bytes(content)
    for command, arguments in (("view", {}), ("str_replace", {"old_str": "a", "new_str": "b"})):
        with pytest.raises(ToolError, match=complaint):
            await edit(bench, command, **arguments)


async def test_wrong_ranges_and_missing_arguments_are_reported_with_the_right_form(bench: Any) -> None:
    await edit(bench, "create", file_text="a\nb\n")
    for arguments, complaint in (
        ({"command": "view", "view_range": [3, 4]}, "2 lines"),
        ({"command": "insert", "insert_line": 9, "new_str": "x"}, "0 to 2"),
        ({"command": "insert", "new_str": "x"}, "insert_line is needed"),
        ({"command": "create"}, "file_text is needed"),
        ({"command": "create", "path": "a.py/b", "file_text": ""}, "a.py/b"),
        ({"command": "create", "file_text": "\ud800"}, "lone surrogate"),
        ({"command": "str_replace", "path": ".", "old_str": "a"}, "is a folder"),
    ):
        with pytest.raises(ToolError, match=complaint):
            await edit(bench, **arguments)


async def test_long_file_is_cut_with_the_range_to_continue(bench: Any) -> None:
    await edit(bench, "create", file_text="some text in a line\n" * 5000)
    shown = await edit(bench, "view")
    assert len(shown) < 50_000
    assert "5000 lines in all" in shown
    assert "view_range [" in shown


async def test_a_folder_is_listed(bench: Any) -> None:
    (bench.folder / "sub").mkdir()
    await edit(bench, "create", file_text="a\n")
    assert (await edit(bench, "view", ".")).splitlines()[1:] == ["a.py", "sub/"]


@pytest.mark.parametrize(
    "call",
    [
        {"command": "str_replace", "old_str": "one", "new_str": "one one"},
        {"command": "insert", "insert_line": 1, "new_str": "two"},
        {"command": "create", "file_text": "new\n"},
        {"command": "undo_edit"},
    ],
    ids=lambda call: call["command"],
)
async def test_an_edit_repeated_after_a_crash_at_any_point_is_done_once(call: Any, bench: Any) -> None:
    await edit(bench, "create", file_text="zero\n")
    await edit(bench, "create", file_text="one\n")
    before = bench.root.with_name("before")
    shutil.copytree(bench.root, before)
    memory: list[Any] = []
    undisturbed = await bench.tools["editor"].execute({"path": "a.py", **call}, bench.crashing(memory, None))
    wanted = files_below(bench.root)
    for crash_before in range(len(memory)):
        shutil.rmtree(bench.root)
        shutil.copytree(before, bench.root)
        remembered: list[Any] = []
        with pytest.raises(bench.crash):
            await bench.tools["editor"].execute({"path": "a.py", **call}, bench.crashing(remembered, crash_before))
        assert len(remembered) == crash_before
        repeated = await bench.tools["editor"].execute({"path": "a.py", **call}, bench.crashing(remembered, None))
        assert repeated == undisturbed
        assert files_below(bench.root) == wanted


def files_below(root: Any) -> Any:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

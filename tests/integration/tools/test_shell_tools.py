"""bash, search and the set `commands-and-files` with real processes."""

from typing import Any

import pytest

from agent_runtime.tools.base import ToolError


async def test_output_and_errors_are_in_chronological_order(bench: Any) -> None:
    result = await bench.use("bash", command="echo one; echo two >&2; echo three; exit 3")
    assert result.content == "one\ntwo\nthree\n[exit code 3]"
    assert result.data["exitCode"] == 3
    assert not result.error, "a command that fails is a result, not a broken call"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat <<'END'\na 'quoted' $line\nEND", "a 'quoted' $line\n[exit code 0]"),
        ("# only a comment", "[exit code 0, no output]"),
        ("printf 'a\\377b'", "a\ufffdb\n[exit code 0]"),
        ("kill -9 $$", "[ended by signal 9, no output]"),
    ],
)
async def test_commands_of_every_kind_are_run_as_they_stand(command: Any, output: Any, bench: Any) -> None:
    assert (await bench.use("bash", command=command)).content == output


async def test_a_syntax_error_is_shown(bench: Any) -> None:
    content = (await bench.use("bash", command="if true; then (")).content
    assert "yntax error" in content
    assert "[exit code 2]" in content


async def test_argument_that_no_process_accepts_is_reported_to_the_model(bench: Any) -> None:
    with pytest.raises(ToolError, match="NUL"):
        await bench.use("bash", command="echo \0")
    with pytest.raises(ToolError, match="NUL"):
        await bench.use("write_file", filepath="a\0b", content="")


async def test_long_output_keeps_its_head_and_its_tail(bench: Any) -> None:
    content = (
        await bench.use("bash", command="echo first; head -c 100000 /dev/zero | tr '\\0' x; echo; echo last")
    ).content
    assert content.startswith("first\n")
    assert content.endswith("last\n[exit code 0]")
    assert f"[… {len('first') + 1 + 100_000 + 1 + len('last') + 1 - 2 * 16_384} bytes omitted …]" in content


async def test_a_timeout_is_explained_and_never_longer_than_the_tasks(bench: Any) -> None:
    content = (await bench.use("bash", command="echo begun; sleep 30", timeout=3)).content
    assert content.startswith("begun\n[timed out after 3 s")
    content = (await bench.use("bash", command="sleep 30", timeout=900)).content
    assert "timed out after 5 s" in content


@pytest.fixture
def tree(bench: Any) -> Any:
    (bench.folder / "src" / "deep er").mkdir(parents=True)
    (bench.folder / ".git").mkdir()
    (bench.folder / ".git" / "config").write_text("needle\n")
    (bench.folder / "src" / "a.py").write_text("x = 1\nneedle = 'a'\n")
    (bench.folder / "src" / "deep er" / "it's.txt").write_text("a needle\n" + "z" * 5000 + " needle\n")
    (bench.folder / "src" / "blob").write_bytes(b"\0needle\n")
    return bench


async def test_text_is_found_with_file_and_line_outside_of_git_and_binaries(tree: Any) -> None:
    lines = (await tree.use("search", pattern="need(le)+")).content.splitlines()
    assert sorted(line[:40] for line in lines) == [
        "src/a.py:2:needle = 'a'",
        "src/deep er/it's.txt:1:a needle",
        f"src/deep er/it's.txt:2:{'z' * 17}",
    ]
    assert max(map(len, lines)) <= 400
    only = (await tree.use("search", pattern="needle", name="*.py")).content
    assert only == "src/a.py:2:needle = 'a'"
    assert (await tree.use("search", pattern="needle", path="src/a.py")).content == only


async def test_files_and_folders_are_found_by_name(tree: Any) -> None:
    assert (await tree.use("search", pattern="it's", kind="files")).content == "src/deep er/it's.txt"
    assert (await tree.use("search", pattern="*.py", kind="files")).content == "src/a.py"
    assert (await tree.use("search", pattern="deep", kind="folders")).content == "src/deep er"


@pytest.mark.parametrize("hostile", ["$(touch owned)", "'; touch owned; '", "-e", "--help", "`touch owned`", "a b\\"])
@pytest.mark.parametrize("place", ["pattern", "path", "name"])
async def test_nothing_in_an_argument_is_run_by_the_shell(hostile: Any, place: Any, tree: Any) -> None:
    try:
        content = (await tree.use("search", **({"pattern": "needle"} | {place: hostile}))).content
        assert "Nothing found" in content
    except ToolError as error:
        assert "grep" in str(error) or "find" in str(error)  # noqa: PT017 - either way nothing was run
    assert not (tree.folder / "owned").exists()


async def test_truncated_results_are_marked(tree: Any) -> None:
    for number in range(12):
        (tree.folder / f"n{number}.txt").write_text("needle\n" * 100)
    content = (await tree.use("search", pattern="needle", max_results=10)).content.splitlines()
    assert len(content) == 11
    assert content[-1] == "[more than 10 results; narrow the pattern or the path]"


async def test_wrong_pattern_and_missing_folder_are_reported(tree: Any) -> None:
    with pytest.raises(ToolError, match="grep"):
        await tree.use("search", pattern="a(")
    with pytest.raises(ToolError, match="No such file"):
        await tree.use("search", pattern="a", path="nowhere")


async def test_the_set_of_commands_and_files_works_on_the_same_workspace(bench: Any) -> None:
    done = await bench.use("write_file", filepath="sub/x.txt", content="hällo")
    assert done.content == "Wrote 6 bytes to sub/x.txt."
    assert (await bench.use("read_file", filepath="sub/x.txt")).content == "hällo"
    result = await bench.use("execute_command", command="cat x.txt", working_directory="sub")
    assert result.content == "hällo\n[exit code 0]"
    with pytest.raises(ToolError, match="could not be read"):
        await bench.use("read_file", filepath="nowhere")
    with pytest.raises(ToolError, match="could not be written"):
        await bench.use("write_file", filepath="sub", content="x")
    (bench.folder / "big").write_bytes(b"x" * 100_000)
    assert "only the first 61440 bytes" in (await bench.use("read_file", filepath="big")).content
    assert (await bench.use("mark_done", message="all done")).stop

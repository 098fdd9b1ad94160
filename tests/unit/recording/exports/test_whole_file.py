"""A file that appears only when it is complete."""

from pathlib import Path

from agent_runtime.export.whole_file import whole_file


def test_two_writers_of_one_file_at_once_leave_the_whole_of_one(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    with whole_file(file) as first, first.open("w") as long:
        long.write("long\n" * 10)
        with whole_file(file) as second, second.open("w") as short:
            short.write("short\n")
    assert file.read_text() == "long\n" * 10
    assert list(tmp_path.iterdir()) == [file]

import stat
import subprocess
from pathlib import Path

import pytest

from hack.cluster.harness import build


def test_failed_build_leaves_no_complete_looking_bundle(tmp_path: Path) -> None:
    def half_a_build() -> None:
        with build.new_folder(tmp_path / "made") as folder:
            (folder / "half").write_text("x")
            build.run(["sh", "-c", "echo no-such-program >&2; exit 1"], folder, {})

    with pytest.raises(build.BuildError, match="no-such-program"):
        half_a_build()
    assert list(tmp_path.iterdir()) == []


def test_finished_build_is_available_to_every_user(tmp_path: Path) -> None:
    with build.new_folder(tmp_path / "made") as folder:
        assert not (tmp_path / "made").exists()
        (folder / "program").write_text("x")
    assert (tmp_path / "made" / "program").read_text() == "x"
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o755


def test_pause_program_ends_on_a_signal(tmp_path: Path) -> None:
    build.compile_pause(tmp_path)
    with subprocess.Popen([tmp_path / "bin" / "pause"]) as program:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.2)
        program.terminate()
        assert program.wait(10) == 0

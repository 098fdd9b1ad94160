"""The script that gives root the files of a grading."""

import subprocess
from pathlib import Path

from agent_runtime.grading.grade import _TAKE_OVER


def test_groups_of_files_stay_for_a_user_who_has_access_by_one(tmp_path: Path) -> None:
    programs, changed, removed = (tmp_path / name for name in ("bin", "changed", "removed"))
    programs.mkdir()
    for name, script in {
        "find": "",
        "chmod": "",
        "chown": f'echo "$@" >> {changed}',
        "setfacl": f'echo "$@" > {removed}',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    script = f"set -- 1000 {programs}\n{_TAKE_OVER}"
    path = {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["/bin/sh", "-c", script], input="/\n/etc\n", text=True, env=path, check=True, timeout=60)
    owners = {line.replace("-R ", "").replace("-h ", "").split()[0] for line in changed.read_text().splitlines()}
    assert owners == {"0"}
    assert removed.read_text() == f"-R -P -k {programs}\n", "default ACLs name users too"

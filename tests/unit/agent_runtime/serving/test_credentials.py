"""Credentials of stores that are rotated while a gateway runs."""

from pathlib import Path

import pytest

from agent_runtime.serving.gateway import environment


def write_secret(folder: Path, version: str, fields: dict[str, str]) -> None:
    """Write a Secret as the kubelet mounts it: `..data` leads to a folder, and is replaced with all files."""
    data = folder / f"..{version}"
    data.mkdir(parents=True)
    for name, value in fields.items():
        (data / name).write_text(value)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))
    link = folder / "..new"
    link.symlink_to(data.name)
    link.rename(folder / "..data")


def test_rotated_credentials_replace_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"AWS_ACCESS_KEY_ID": "old", "AWS_SECRET_ACCESS_KEY": "old-secret", "AWS_SESSION_TOKEN": "temporary"}
    for name, value in {**old, "HTTPS_PROXY": "http://proxy"}.items():
        monkeypatch.setenv(name, value)
    write_secret(tmp_path, "1", old)
    environ = environment(tmp_path)
    assert environ().items() >= old.items()
    new = {"AWS_ACCESS_KEY_ID": "new", "AWS_SECRET_ACCESS_KEY": "new-secret"}
    write_secret(tmp_path, "2", new)
    assert environ().items() >= {**new, "HTTPS_PROXY": "http://proxy"}.items()
    assert "AWS_SESSION_TOKEN" not in environ()


def test_absent_secret_leaves_the_process_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "here")
    assert environment(None)()["AWS_REGION"] == environment(tmp_path)()["AWS_REGION"] == "here"

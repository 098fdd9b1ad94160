import io
import json
import tarfile
from pathlib import Path

import pytest

from hack.cluster.harness.archives import ArchiveError, image_names, write_archive


def write_tar(path: Path, files: dict[str, object]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, value in files.items():
            content = json.dumps(value).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_an_archive_made_here_names_its_image_and_is_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("x")
    (tmp_path / "link").symlink_to("program")
    for number in (1, 2):
        write_archive(tmp_path / f"{number}.tar", "localhost/x:1", {"/x": tmp_path / "link"})
    assert image_names(tmp_path / "1.tar") == ["localhost/x:1"]
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    with tarfile.open(tmp_path / "1.tar") as tar:
        layer = tar.extractfile("layer.tar")
        assert layer is not None
        with tarfile.open(fileobj=io.BytesIO(layer.read())) as inner:
            # The file and not the link, whose target does not exist in the container.
            assert [(entry.name, entry.isreg(), entry.mode) for entry in inner] == [("x", True, 0o755)]


def test_names_in_an_oci_archive_of_any_tool_are_found(tmp_path: Path) -> None:
    manifests = [
        {"annotations": {"org.opencontainers.image.ref.name": "1", "io.containerd.image.name": "localhost/a:1"}},
        {"annotations": {"org.opencontainers.image.ref.name": "localhost/b:1"}},
        {},
    ]
    archive = write_tar(tmp_path / "oci.tar", {"./index.json": {"manifests": manifests}})
    assert image_names(archive) == ["localhost/a:1", "localhost/b:1"]


def test_program_without_public_permissions_is_marked_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("x")
    programs = {"/all": tmp_path / "program", "/some": tmp_path / "program"}
    write_archive(tmp_path / "x.tar", "localhost/x:1", programs, {"/some": 0o750})
    with tarfile.open(tmp_path / "x.tar") as tar, tarfile.open(fileobj=tar.extractfile("layer.tar")) as layer:
        assert [(entry.name, entry.mode) for entry in layer] == [("all", 0o755), ("some", 0o750)]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"other": 1}, "neither manifest.json nor index.json"),
        ({"manifest.json": [{"RepoTags": None}]}, "no name"),
        ({"manifest.json": 1}, "expected a docker or OCI archive"),
        ({"index.json": {}}, "expected a docker or OCI archive"),
    ],
)
def test_file_without_a_named_image_is_refused_with_what_was_expected(
    tmp_path: Path, files: dict[str, object], fault: str
) -> None:
    with pytest.raises(ArchiveError, match=fault):
        image_names(write_tar(tmp_path / "x.tar", files))


def test_file_other_than_an_archive_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(ArchiveError, match="notes"):
        image_names(tmp_path / "notes")

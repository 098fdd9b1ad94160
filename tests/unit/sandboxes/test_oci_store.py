"""The cache of unpacked images: which image is found, what is refused, and the effects of a kill or a second process."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_runtime.sandboxes.images.files import ImageError, this_architecture
from agent_runtime.sandboxes.images.store import ImageStore, Place, UnpackedImage, chain_id, place_of
from tests.support.oci import Layout, digest_of, layer_tar

REPOSITORY = Path(__file__).parents[3]
BASE, TOP = layer_tar({"etc/": b"", "etc/name": b"base"}), layer_tar({"etc/name": b"top"})


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path, tmp_path / "store")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def names_of(image: UnpackedImage) -> list[str]:
    return [(layer / "etc/name").read_text() for layer in image.layers]


@pytest.mark.parametrize("packed", ["", "+gzip", "+zstd"])
def test_image_is_unpacked_with_any_compression(store: ImageStore, layout: Layout, packed: str) -> None:
    layout.image([BASE, TOP], packed=packed, config={"Env": ["A=b=c", "P=/x"], "User": "me", "WorkingDir": "/app"})
    image = store.unpack("./layout")
    assert names_of(image) == ["top", "base"]
    assert (dict(image.config.env), image.config.user, image.config.working_dir) == (
        {"A": "b=c", "P": "/x"},
        "me",
        "/app",
    )


def test_every_form_of_an_image_gives_the_same_layers(store: ImageStore, layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE, TOP], annotations={"org.opencontainers.image.ref.name": "v1"})
    layout.archive(tmp_path / "image.tar")
    config = json.dumps({"rootfs": {"diff_ids": [digest_of(BASE), digest_of(TOP)]}, "config": {}}).encode()
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["x:v1"], "Layers": ["0.tar", "1.tar"]}]).encode()
    with tarfile.open(tmp_path / "docker.tar", "w") as archive:
        for name, content in (("c.json", config), ("manifest.json", manifest), ("0.tar", BASE), ("1.tar", TOP)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    forms = ["oci:layout", "oci:layout:v1", str(tmp_path / "layout"), "oci-archive:image.tar:v1", "./image.tar"]
    forms += ["docker-archive:docker.tar", "docker-archive:docker.tar:x:v1", "./docker.tar"]
    assert {tuple(store.unpack(form).layers) for form in forms} == {tuple(store.unpack("./layout").layers)}


def test_a_plain_folder_is_used_as_it_is(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    image = store.unpack("./root")
    assert (image.layers, image.digest) == ([tmp_path / "root"], None)
    assert not (tmp_path / "store").exists()


def test_images_with_the_same_base_share_its_layers(store: ImageStore, tmp_path: Path) -> None:
    other = layer_tar({"etc/name": b"other"})
    for name, layers in (("one", [BASE, TOP]), ("two", [BASE, other]), ("three", [other, TOP])):
        Layout(tmp_path / name).image(layers)
    one, two, three = (store.unpack(f"./{name}") for name in ("one", "two", "three"))
    assert one.layers[1] == two.layers[1]
    assert one.layers[0] != three.layers[0]
    assert one.key != two.key


def test_the_chain_id_is_the_specifications() -> None:
    assert chain_id("", "sha256:a") == "sha256:a"
    assert chain_id("sha256:a", "sha256:b") == digest_of(b"sha256:a sha256:b")


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("python:3.12", None),
        ("registry.example:5000/a/b@sha256:0", None),
        ("/images/x.tar", Place(Path("/images/x.tar"))),
        ("./x", Place(Path("/base/x"))),
        ("oci:x", Place(Path("/base/x"))),
        ("oci:/x:v1", Place(Path("/x"), "v1")),
        ("docker-archive:x.tar:name:tag", Place(Path("/base/x.tar"), "name:tag")),
    ],
)
def test_paths_differ_from_names_of_registries(reference: str, place: Place | None) -> None:
    assert place_of(reference, Path("/base")) == place


def test_image_for_this_processor_is_chosen_from_an_index(store: ImageStore, layout: Layout) -> None:
    other = {"os": "linux", "architecture": "sparc"}
    images = [
        layout.image([TOP], platform=other),
        layout.image([BASE], platform={"os": "linux", "architecture": this_architecture()}),
    ]
    index = json.dumps({"manifests": images}).encode()
    layout.write([layout.blob(index, "application/vnd.oci.image.index.v1+json")])
    assert names_of(store.unpack("./layout")) == ["base"]
    layout.write([layout.image([TOP], platform=other), layout.image([TOP], platform=other)])
    with pytest.raises(ImageError, match=r"linux/sparc.*this machine is linux/"):
        store.unpack("./layout")


def test_one_of_several_images_must_be_named(store: ImageStore, layout: Layout) -> None:
    for name in ("v1", "v2"):
        layout.image([BASE], annotations={"org.opencontainers.image.ref.name": name})
    with pytest.raises(ImageError, match=r"2 images.*v1, v2.*:NAME"):
        store.unpack("./layout")
    with pytest.raises(ImageError, match=r"no image 'v3'.*v1, v2"):
        store.unpack("oci:layout:v3")


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "cut": lambda blob: blob.write_bytes(blob.read_bytes()[:700]),
    "changed": lambda blob: blob.write_bytes(blob.read_bytes().replace(b"base", b"evil")),
    "gone": lambda blob: blob.unlink(),
    "no tar": lambda blob: blob.write_bytes(b"x" * 3000),
    "padded": lambda blob: blob.write_bytes(blob.read_bytes() + bytes(512)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_layer_with_a_wrong_digest_is_never_used(
    store: ImageStore, layout: Layout, tmp_path: Path, damage: str
) -> None:
    layout.image([BASE])
    blob = layout.folder / "blobs/sha256" / digest_of(BASE).removeprefix("sha256:")
    whole = blob.read_bytes()
    DAMAGES[damage](blob)
    for _ in range(2):
        with pytest.raises(ImageError, match="layout"):
            store.unpack("./layout")
        assert list((tmp_path / "store/layers").iterdir()) == []
    blob.write_bytes(whole)
    assert names_of(store.unpack("./layout")) == ["base"]


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "md5:abc", 7, None])
def test_a_digest_that_is_a_path_is_refused(store: ImageStore, layout: Layout, digest: object) -> None:
    layout.write([{"digest": digest}])
    with pytest.raises(ImageError, match="64 hexadecimal digits"):
        store.unpack("./layout")


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"manifests": {}}', '{"manifests": [1]}'])
def test_invalid_index_is_refused_by_name(store: ImageStore, layout: Layout, content: str) -> None:
    (layout.folder / "index.json").write_text(content)
    with pytest.raises(ImageError, match="layout"):
        store.unpack("./layout")


def test_file_other_than_an_image_names_the_expected_form(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "image.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ImageError, match="oci-archive"):
        store.unpack("./image.tar.gz")
    with pytest.raises(ImageError, match="does not exist"):
        store.unpack("./missing.tar")


@pytest.mark.parametrize(
    ("name", "pulled"),
    [
        ("r.example:5000/a/b:1@sha256:c", "r.example:5000/a/b@sha256:c"),
        ("b:1@sha256:c", "b@sha256:c"),
        ("b@sha256:c", "b@sha256:c"),
        ("r.example:5000/b:1", "r.example:5000/b:1"),
    ],
)
def test_image_with_tag_and_digest_is_pulled_by_its_digest(
    name: str, pulled: str, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skopeo = tmp_path / "skopeo"
    skopeo.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called; exit 1\n')
    skopeo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ImageError, match="cannot be pulled"):
        store.unpack(name)
    assert f"docker://{pulled} " in (tmp_path / "called").read_text()


def test_image_name_without_skopeo_is_refused_with_advice(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImageError, match=r"python:3.12.*skopeo.*--provider Container"):
        store.unpack("python:3.12")


def test_other_users_cannot_reach_the_images_programs(store: ImageStore, layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE])
    store.unpack("./layout")
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


UNPACK = (
    "import sys; from pathlib import Path; from agent_runtime.sandboxes.images.store import ImageStore\n"
    "image = ImageStore(Path(), Path(sys.argv[2])).unpack(sys.argv[1])\n"
    "print(sum(1 for _ in image.layers[0].iterdir()))"
)


def unpacking(layout: Layout, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", UNPACK, str(layout.folder), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_kill_in_the_middle_and_processes_at_the_same_time_leave_one_whole_image(
    layout: Layout, tmp_path: Path
) -> None:
    layout.image([layer_tar({f"file-{number}": b"x" * 50 for number in range(4000)})])
    folder = tmp_path / "store"
    with unpacking(layout, folder) as killed:
        while not list(folder.glob("layers/*.partial/file-*")):
            assert killed.poll() is None
            time.sleep(0.001)
        killed.send_signal(signal.SIGKILL)
    assert list(folder.glob("layers/*.partial"))
    others = [unpacking(layout, folder) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in others] == ["4000", "4000"]
    (layer,) = (folder / "layers").iterdir()
    assert layer.suffix != ".partial"

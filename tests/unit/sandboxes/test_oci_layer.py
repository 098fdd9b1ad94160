"""The unpacked form of a layer's tar: marks for overlayfs, and nothing outside the folder, whatever the tar contains."""

import contextlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.images.files import ImageError
from agent_runtime.sandboxes.images.layer import unpack_layer

OPAQUE = "user.overlay.opaque"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, **pax: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.uid, info.gid = os.getuid(), os.getgid()
    info.pax_headers = {header.replace("__", "."): value for header, value in pax.items()}
    return info


def tar_of(*members: tuple[tarfile.TarInfo, bytes] | tarfile.TarInfo) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in members:
            info, content = entry if isinstance(entry, tuple) else (entry, b"")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def unpacked(
    folder: Path, *members: tuple[tarfile.TarInfo, bytes] | tarfile.TarInfo, below: Sequence[Path] = ()
) -> Path:
    folder.mkdir(exist_ok=True)
    unpack_layer(tar_of(*members), folder, below, owners=False)
    return folder


def is_whiteout(path: Path) -> bool:
    info = path.lstat()
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(path: Path) -> bool:
    return OPAQUE in os.listxattr(path)


def test_entries_deleted_in_a_layer_are_hidden_in_lower_layers(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "l", member("etc/.wh.gone"), member("opt/.wh..wh..opq"), (member("opt/new"), b"x"))
    assert is_whiteout(layer / "etc/gone")
    assert is_opaque(layer / "opt")
    assert (layer / "opt/new").read_bytes() == b"x"
    assert not list(layer.rglob(".wh.*"))


@pytest.mark.parametrize("mark_first", [True, False])
def test_folder_deleted_and_created_again_hides_the_old_one(tmp_path: Path, mark_first: bool) -> None:
    entries = [member(".wh.data"), member("data", tarfile.DIRTYPE, mode=0o755)]
    layer = unpacked(tmp_path / "l", *(entries if mark_first else reversed(entries)))
    assert is_opaque(layer / "data")


def test_file_deleted_and_created_again_in_one_layer_exists(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "l", (member("f"), b"new"), member(".wh.f"))
    assert (layer / "f").read_bytes() == b"new"


def test_folder_that_is_missing_in_the_tar_has_the_mode_of_lower_layers(tmp_path: Path) -> None:
    base = unpacked(tmp_path / "base", member("secret", tarfile.DIRTYPE, mode=0o2710))
    middle = unpacked(tmp_path / "middle", (member("other"), b""), below=[base])
    top = unpacked(tmp_path / "top", (member("secret/f"), b""), (member("fresh/f"), b""), below=[middle, base])
    assert stat.S_IMODE((top / "secret").stat().st_mode) == 0o2710
    assert stat.S_IMODE((top / "fresh").stat().st_mode) == 0o755


def test_folder_deleted_in_a_layer_between_gets_no_mode_of_lower_layers(tmp_path: Path) -> None:
    base = unpacked(tmp_path / "base", member("secret", tarfile.DIRTYPE, mode=0o700))
    middle = unpacked(tmp_path / "middle", member(".wh.secret"), below=[base])
    top = unpacked(tmp_path / "top", (member("secret/f"), b""), below=[middle, base])
    assert stat.S_IMODE((top / "secret").stat().st_mode) == 0o755


def test_modes_times_hard_links_and_attributes_are_the_images(tmp_path: Path) -> None:
    program = member("bin/su", mode=0o4755, SCHILY__xattr__user__note="caf\u00e9")
    program.mtime = 1_000_000_000.5
    layer = unpacked(tmp_path / "l", (program, b"x"), member("bin/same", tarfile.LNKTYPE, "bin/su"))
    info = (layer / "bin/su").stat()
    assert stat.S_IMODE(info.st_mode) == 0o4755
    assert info.st_mtime == 1_000_000_000.5
    assert info.st_ino == (layer / "bin/same").stat().st_ino
    assert os.getxattr(layer / "bin/su", "user.note") == "café".encode()


def test_no_image_can_give_overlayfs_instructions(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "l", (member("f", SCHILY__xattr__user__overlay__redirect="/etc"), b""))
    assert os.listxattr(layer / "f") == []


def test_a_read_only_folder_can_still_be_filled(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "l", member("ro", tarfile.DIRTYPE, mode=0o555), (member("ro/f"), b"x"))
    assert (layer / "ro/f").read_bytes() == b"x"
    assert stat.S_IMODE((layer / "ro").stat().st_mode) == 0o555


def test_a_hard_link_to_a_file_of_a_lower_layer_has_its_content(tmp_path: Path) -> None:
    base = unpacked(tmp_path / "base", (member("a", mode=0o750), b"below"))
    top = unpacked(tmp_path / "top", member("b", tarfile.LNKTYPE, "a"), below=[base])
    assert (top / "b").read_bytes() == (top / "a").read_bytes() == b"below"
    assert stat.S_IMODE((top / "b").stat().st_mode) == 0o750


def test_devices_are_left_out(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "l", member("dev/sda", tarfile.BLKTYPE), member("dev/mem", tarfile.CHRTYPE))
    assert list((layer / "dev").iterdir()) == []


def test_a_link_out_of_the_image_leads_back_into_it(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    layer = unpacked(
        tmp_path / "l",
        member("absolute", tarfile.SYMTYPE, str(tmp_path / "outside")),
        (member("absolute/f"), b"x"),
        member("up", tarfile.SYMTYPE, "../../outside"),
        (member("up/g"), b"x"),
    )
    assert list((tmp_path / "outside").iterdir()) == []
    assert (layer / "outside/g").exists()


@pytest.mark.parametrize(
    "entry",
    [
        member("../out"),
        member("a/../../out"),
        member("f", tarfile.LNKTYPE, "../../etc/passwd"),
        member("f", tarfile.LNKTYPE, "nowhere"),
        member(".wh.."),
        member(".wh."),
    ],
    ids=lambda entry: f"{entry.name} {entry.linkname}",
)
def test_an_entry_that_leads_elsewhere_is_refused_by_name(tmp_path: Path, entry: tarfile.TarInfo) -> None:
    with pytest.raises(ImageError, match=r"'.*'"):
        unpacked(tmp_path / "l", entry)
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


def test_circular_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="loop"):
        unpacked(tmp_path / "l", member("a", tarfile.SYMTYPE, "b"), member("b", tarfile.SYMTYPE, "a"), member("a/f"))


def test_a_tar_that_breaks_off_is_refused(tmp_path: Path) -> None:
    whole = tar_of((member("f"), bytes(100_000))).getvalue()
    with pytest.raises(ImageError):
        unpack_layer(io.BytesIO(whole[:50_000]), tmp_path, [], owners=False)


# Against a model: a file system is {path: content or None for a folder}; layers are applied to it one after the other.
Files = dict[str, bytes | None]
Entry = tuple[str, str, bytes]
NAMES = ["a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/a/b"]


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


@st.composite
def layers(draw: st.DrawFn) -> list[list[Entry]]:
    """Layers as a builder writes them: no name twice, parents before their content, deletions of existing entries."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        layer: dict[str, Entry] = {}
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
            if any(layer.get(parent, ("folder",))[0] != "folder" for parent in parents(name)):
                continue
            if any(other.startswith(f"{name}/") for other in layer):
                continue
            kind = draw(st.sampled_from(["file", "folder", "opaque", "deleted"]))
            layer[name] = (kind, name, draw(st.binary(max_size=3)))
        made.append(list(layer.values()))
    return made


def applied(files: Files, layer: list[Entry]) -> Files:
    """Return the result by the image specification: deletions first, then the layer's entries."""
    files = dict(files)

    def clear(path: str, *, itself: bool) -> None:
        for other in [other for other in files if other.startswith(f"{path}/") or (itself and other == path)]:
            del files[other]

    for kind, name, _ in layer:
        if kind in ("deleted", "opaque"):
            clear(name, itself=kind == "deleted")
    for kind, name, content in layer:
        for parent in parents(name):
            if files.get(parent, b"") is not None:
                files.pop(parent, None)
                files[parent] = None
        if kind == "file":
            clear(name, itself=True)
            files[name] = content
        elif kind in ("folder", "opaque") and files.get(name, b"") is not None:
            files[name] = None
    return files


def seen(stack: Sequence[Path]) -> Files:
    """Return what overlayfs shows of unpacked layers, the topmost first."""
    found: Files = {}

    def look(folders: Sequence[Path], prefix: str) -> None:
        names: dict[str, list[Path]] = {}
        for folder in folders:
            for path in folder.iterdir():
                names.setdefault(path.name, []).append(path)
        for name, paths in names.items():
            if is_whiteout(paths[0]):
                continue
            if not paths[0].is_dir():
                found[prefix + name] = paths[0].read_bytes()
                continue
            found[prefix + name] = None
            merged = []
            for path in paths:
                if is_whiteout(path) or not path.is_dir():
                    break
                merged.append(path)
                if is_opaque(path):
                    break
            look(merged, f"{prefix}{name}/")

    look(stack, "")
    return found


def entries(layer: list[Entry]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for kind, name, content in layer:
        folder, _, last = name.rpartition("/")
        match kind:
            case "file":
                yield member(name), content
            case "folder":
                yield member(name, tarfile.DIRTYPE, mode=0o755), b""
            case "opaque":
                yield member(name, tarfile.DIRTYPE, mode=0o755), b""
                yield member(f"{name}/.wh..wh..opq"), b""
            case "deleted":
                yield member(f"{folder}/.wh.{last}".lstrip("/")), b""


@given(layers(), st.randoms(use_true_random=False))
def test_workspaces_see_the_files_of_the_image_specification(made: list[list[Entry]], order: Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected: Files = {}
        stack: list[Path] = []
        for number, layer in enumerate(made):
            expected = applied(expected, layer)
            tar = list(entries(layer))
            order.shuffle(tar)
            stack.insert(0, unpacked(Path(folder) / str(number), *tar, below=list(stack)))
        assert seen(stack) == expected


HOSTILE = st.sampled_from(
    ["a", "b", "..", ".", "", "/", "/etc", "a/b", "../x", "a/../..", ".wh.a", ".wh..wh..opq", "\u00e9"]
)
KINDS = [
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    b"7",
    b"S",
]


@given(st.lists(st.tuples(st.lists(HOSTILE, max_size=3), st.sampled_from(KINDS), st.lists(HOSTILE, max_size=3))))
def test_no_tar_writes_outside_its_folder(made: list[tuple[list[str], bytes, list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "deep" / "layer"
        folder.mkdir(parents=True)
        infos = [member("/".join(name), kind, "/".join(link)) for name, kind, link in made]
        before: Mapping[str, float] = {str(path): path.stat().st_mtime_ns for path in (Path(top), folder.parent)}
        with contextlib.suppress(ImageError):
            unpack_layer(tar_of(*infos), folder, [], owners=False)
        assert {str(path): path.stat().st_mtime_ns for path in (Path(top), folder.parent)} == before

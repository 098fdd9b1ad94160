"""Dockerfiles built as layers: the same files as buildah's images, each step made once, and clear failures."""

import asyncio
import gzip
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import tarfile
import textwrap
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import zstandard

from agent_runtime.builds import trees
from agent_runtime.sandboxes.base import SandboxFailure, SetupFailed
from agent_runtime.sandboxes.images.store import ImageStore
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import ContextFile, Dockerfile
from rollout_api.sandbox import SandboxTemplate
from tests.integration.oci.conftest import Buildah
from tests.support.dockerfile_corpus import CORPUS, generated, offline, write_corpus_context
from tests.support.dockerfile_trees import Builds, differences, dockerfile_of, tree_of_buildah

BASE = "debian:12"


@pytest.fixture(scope="module")
def base(buildah: Buildah, debian: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive of the base image; buildah knows it by the name in the Dockerfiles."""
    buildah("tag", debian, f"localhost/{BASE}", f"docker.io/library/{BASE}")
    return f"oci-archive:{buildah.archive(debian, tmp_path_factory.mktemp('base') / 'base.tar')}"


@pytest_asyncio.fixture
async def builds(tmp_path: Path, store: ImageStore, base: str) -> AsyncIterator[Builds]:
    provider = LocalProvider(tmp_path / "run", SandboxTemplate(image=base), places=4, images=store)
    await provider.open()
    yield Builds(provider, tmp_path / "out", {BASE: base, "alias": base})
    await provider.close()


def write_context(folder: Path) -> None:
    """Write files of the kinds that COPY treats differently."""
    for path, content in {
        "a.txt": "a",
        "b.txt": "b",
        "run.sh": "#!/bin/sh\necho run",
        "src/main.py": "print(1)",
        "src/lib/deep/x.py": "x",
        "src/lib/skip.log": "log",
        "src/.hidden": "h",
        "odd/with blank.txt": "blank",
        "ignored/file": "never copied",
        ".dockerignore": "ignored\n**/*.tmp\n!keep.tmp\n",
        "c.tmp": "left out",
        "keep.tmp": "kept",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    for entry in folder.rglob("*"):
        entry.chmod(0o755 if entry.is_dir() or entry.suffix == ".sh" else 0o644)
    with tarfile.open(folder / "packed.tar.gz", "w:gz") as tar:
        for name in ("src/main.py", "src/lib"):
            tar.add(folder / name, f"packed/{name}", filter=_owned)
    (folder / "packed.tar.gz").chmod(0o644)
    (folder / "linked").mkdir()
    for name, target in {"file": "../a.txt", "folder": "../src", "gone": "nowhere", "out": "/etc/passwd"}.items():
        (folder / "linked" / name).symlink_to(target)
    (folder / "way").symlink_to("linked/folder")
    for name, mode in {"linked/plain.sh": 0o640, "linked/tool": 0o711}.items():
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(mode)


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname = 70, 71, "", ""
    return member


SAME = {
    "copy": """
        COPY a.txt /one
        COPY a.txt b.txt /several/
        COPY src /tree
        COPY src/ /usr/share/tree/
        COPY src/*.py /globs/
        COPY [".dockerignore", "odd/with blank.txt", "/json/"]
        COPY odd/ /odd/
        COPY run.sh a.txt /usr/local/bin/
        COPY a.txt /usr/bin
        COPY . /everything
    """,
    "copy of links": """
        COPY linked /linked
        COPY --chown=3:4 --chmod=640 linked /owned
        COPY linked/file /one
        COPY linked/file linked/plain.sh /several/
        COPY linked/folder /folder
        COPY way/lib /lib-of-link
        COPY way/main.py /through
    """,
    "copy with owners and modes": """
        RUN useradd -u 4321 -U someone && groupadd -g 55 others
        COPY --chown=someone a.txt /new/folders/a
        COPY --chown=someone:others src /owned
        COPY --chown=7 a.txt /seven
        COPY --chown=7:8 --chmod=4750 b.txt /modes/
        COPY --chmod=600 run.sh /usr/local/bin/
    """,
    "copy over what is there": """
        RUN mkdir -p /there/lib/deep && chmod 700 /there /there/lib && chown 9:9 /there/lib && echo old > /there/main.py
        COPY src /there
        RUN ln -s /usr/share /linked && mkdir /srv/real && ln -s real /srv/alias
        COPY a.txt /linked/inside
        COPY b.txt /srv/alias/
        COPY src /bin/tree
    """,
    "settings of commands": """
        ARG FIRST=one
        ARG SECOND
        ENV THIRD="$FIRST two" FOURTH=${SECOND:-none}
        ENV LEGACY some text
        WORKDIR /made/here
        WORKDIR below
        RUN pwd > place && echo "$FIRST|$SECOND|$THIRD|$FOURTH|$LEGACY|$HOME|$PATH" > variables
        SHELL ["/bin/bash", "-c"]
        RUN [[ 1 == 1 ]] && echo bash > shell
        RUN ["/bin/sh", "-c", "echo exec > exec"]
        USER 33:34
        RUN id -u > /tmp/id; cp /tmp/id /var/tmp/id
        USER root
        WORKDIR /
        RUN echo $FIRST \\
              # a comment inside

              and more > /continued
    """,
    "changes of every kind": """
        RUN rm -rf /usr/share/doc && mkdir /usr/share/doc && echo new > /usr/share/doc/only
        RUN rm /etc/debian_version && mkdir /etc/debian_version && touch /etc/debian_version/x
        RUN chmod 711 /srv && chown 5:6 /opt && ln -s nowhere /dangling && mkfifo /fifo
        RUN echo one > /first && ln /first /second && ln /etc/passwd /passwd
        RUN mv /usr/share/man /usr/share/moved; rm -rf /var/cache/*
        RUN cp /bin/true /true && \\
            python3 -c "from os import *; setxattr('/true', 'user.note', b'x'); setxattr('/opt', 'user.kept', b'y')"
        RUN rm -rf /usr/share/doc
    """,
    "stages": """
        RUN mkdir -p /built/bin && cp /bin/true /built/bin/tool && chown -R 12:13 /built && ln -s tool /built/bin/link
        FROM first AS second
        RUN echo second > /built/second
        FROM debian:12
        COPY --from=first /built /plain
        COPY --from=second /built/bin/tool /built/second /files/
        COPY --from=1 --chown=3:4 /built/ /owned/
        COPY --from=second /built/bin/* /globs/
        COPY --from=debian:12 /etc/debian_version /version
    """,
    "archives": """
        ADD packed.tar.gz /unpacked
        ADD packed.tar.gz a.txt /both/
        COPY packed.tar.gz /kept/
    """,
    "mounts": """
        RUN --mount=type=cache,target=/root/.cache/pip --mount=type=tmpfs,target=/scratch \\
            touch /root/.cache/pip/x /scratch/y && ls /scratch > /seen
        RUN --mount=type=bind,source=src,target=/mnt/src cat /mnt/src/main.py > /from-bind
        FROM debian:12
        RUN --mount=type=bind,from=first,source=/etc,target=/mnt/etc cat /mnt/etc/debian_version > /from-stage
    """,
}
# A comparison takes as long as an image of buildah. The others run in `make test-full`.
QUICK = ("copy", "changes of every kind", "stages")
# buildah 1.28 leaves the folders in which it mounts.
LEFT_BY_BUILDAH = ("root/.cache", "scratch", "mnt/src", "mnt/etc", "srv/in", "srv/cache", "srv/scratch")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SAME]
)
async def test_files_are_those_of_buildahs_image(builds: Builds, buildah: Buildah, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "context"
    write_context(folder)
    lines = [line[8:] if line.startswith(" " * 8) else line for line in SAME[name].splitlines()]
    (folder / "Dockerfile").write_text("\n".join([f"FROM {BASE} AS first", *lines, ""]))
    theirs = await asyncio.to_thread(tree_of_buildah, buildah, folder)
    ours = await builds.tree(dockerfile_of(folder))
    found = differences(ours, theirs)
    assert not {path: both for path, both in found.items() if not path.startswith(LEFT_BY_BUILDAH)}


async def _compare(builds: Builds, buildah: Buildah, folder: Path, text: str) -> dict[str, object]:
    (folder / "Dockerfile").write_text(text)
    theirs = await asyncio.to_thread(tree_of_buildah, buildah, folder)
    return differences(await builds.tree(dockerfile_of(folder)), theirs)


@pytest.mark.full
@pytest.mark.parametrize("name", CORPUS)
async def test_environments_of_tasks_equal_buildahs_images(
    builds: Builds, buildah: Buildah, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "context"
    write_corpus_context(folder)
    text = textwrap.dedent(CORPUS[name])
    found = await _compare(builds, buildah, folder, text)
    assert not {path: both for path, both in found.items() if not path.startswith(LEFT_BY_BUILDAH)}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
async def test_generated_changes_equal_buildahs_images(
    builds: Builds, buildah: Buildah, tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "context"
    write_corpus_context(folder)
    assert not await _compare(builds, buildah, folder, generated(seed))


PUBLIC = os.environ.get("ROLLOUT_PUBLIC_TASKS", "")


@pytest.mark.full
@pytest.mark.skipif(not PUBLIC, reason="ROLLOUT_PUBLIC_TASKS names no folder with Dockerfiles of public tasks")
async def test_public_environments_equal_buildahs_images(builds: Builds, buildah: Buildah, tmp_path: Path) -> None:
    """Up to 20 folders at random, over our base image and without the steps that need a network."""
    found = sorted(path.parent for path in Path(PUBLIC).rglob("Dockerfile"))
    compared = 0
    for number, source in enumerate(random.Random(0).sample(found, min(20, len(found)))):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder, symlinks=True)
        text = offline((source / "Dockerfile").read_text(), BASE)
        try:
            differing = await _compare(builds, buildah, folder, text)
        except subprocess.CalledProcessError:
            # It needs what a removed step would have installed, or a newer buildah.
            print(f"{source}: buildah fails")
            continue
        compared += 1
        print(f"{source}: {text.count('RUN')} RUN, {len(differing)} files differ")
        assert not {path: both for path, both in differing.items() if not path.startswith(LEFT_BY_BUILDAH)}, source
    assert compared, f"{PUBLIC} has no Dockerfile that buildah can build here"


def written(text: str, **files: str) -> Dockerfile:
    """A Dockerfile over the base, with files of its context."""
    context = [ContextFile(path=path.replace("_", "."), content=content) for path, content in files.items()]
    return Dockerfile(text=f"FROM {BASE}\n{text}", context=context, seconds=20)


async def test_only_what_changed_is_made_again(builds: Builds) -> None:
    text = "RUN echo one > /one\nCOPY a.txt /a\nRUN echo two > /two\nENV X=1\n"
    await builds.build(written(text, a_txt="a", other_txt="o"))
    assert builds.made == ["RUN echo one > /one", "COPY a.txt /a", "RUN echo two > /two"]
    spec = await builds.build(written(text, a_txt="a", other_txt="changed"))
    assert builds.made == []
    assert spec.env == {"X": "1"}
    spec = await builds.build(written(text, a_txt="b"))
    assert builds.made == ["COPY a.txt /a", "RUN echo two > /two"]
    assert await builds.output_of(spec, "cat", "/a", "/one", "/two") == "bone\ntwo\n"


async def test_equal_steps_of_tasks_are_made_once_at_the_same_time(builds: Builds) -> None:
    builder = builds.builder()
    texts = [f"RUN sleep 0.2; date +%N > /common\nRUN echo {number} > /own\n" for number in range(4)]
    specs = await asyncio.gather(*(builder.completed(builds.spec(written(text))) for text in texts))
    outputs = [await builds.output_of(spec, "cat", "/common", "/own") for spec in specs]
    assert len({output.split()[0] for output in outputs}) == 1
    assert [output.split()[1] for output in outputs] == ["0", "1", "2", "3"]


async def test_task_does_not_share_the_shorter_time_limit_of_another(builds: Builds) -> None:
    builder, text = builds.builder(), f"FROM {BASE}\nRUN sleep 3; echo made > /made\n"
    short, long = (builds.spec(Dockerfile(text=text, seconds=seconds)) for seconds in (1, 20))
    found = await asyncio.gather(builder.completed(short), builder.completed(long), return_exceptions=True)
    assert isinstance(found[0], SetupFailed)
    assert not isinstance(found[1], BaseException), found[1]
    assert await builds.output_of(found[1], "cat", "/made") == "made\n"
    assert (await builder.completed(short)).layers, "it uses what the other one has made"


async def test_later_attempts_of_a_group_ask_the_storage_nothing(builds: Builds) -> None:
    builder, dockerfile = builds.builder(), written("RUN echo made > /made\n")
    spec = builds.spec(dockerfile)
    first, second = await asyncio.gather(builder.completed(spec), builder.completed(spec))
    assert [was_stored for _, was_stored in builds.steps] == [False]
    shutil.rmtree(builds.output)
    assert [layer.digest for layer in (await builder.completed(spec)).layers] == [first.layers[0].digest]
    assert second == first
    builder.forget_group(spec.group)
    await builder.completed(spec)
    assert builds.made == ["RUN echo made > /made"] * 2, "a new group looks its steps up again"


async def test_racing_builders_both_succeed_with_working_layers(builds: Builds) -> None:
    dockerfile = written("RUN sleep 0.2; echo made > /made\n")
    specs = await asyncio.gather(*(builds.build(dockerfile) for _ in range(3)))
    assert [await builds.output_of(spec, "cat", "/made") for spec in specs] == ["made\n"] * 3


async def test_stage_is_not_built_if_what_copies_from_it_is_stored(builds: Builds) -> None:
    text = f"RUN echo built > /built\nFROM {BASE}\nCOPY --from=0 /built /copied\n"
    await builds.build(written(text))
    assert builds.made == ["RUN echo built > /built", "COPY /built /copied"]
    (stage,) = (
        path for path in (builds.output / "builds").iterdir() if json.loads(path.read_text())["step"].startswith("RUN")
    )
    stage.unlink()
    spec = await builds.build(written(text))
    assert builds.made == []
    assert await builds.output_of(spec, "cat", "/copied") == "built\n"


async def test_damaged_layer_is_made_again_after_the_first_failure(builds: Builds) -> None:
    dockerfile = written("RUN echo made > /made\n")
    spec = await builds.build(dockerfile)
    (layer,) = (path for path in (builds.output / "layers").iterdir() if path.suffix == ".zst")
    layer.write_bytes(layer.read_bytes()[:-20])
    with pytest.raises(SandboxFailure, match="the layer of 'RUN echo made > /made'") as lost:
        await builds.output_of(spec, "true")
    assert lost.value.reason == "LayerLost"
    builds.made.clear()
    again = await builds.build(dockerfile)
    assert await builds.output_of(again, "cat", "/made") == "made\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "RUN true\nRUN echo said; exit 3\n",
            r"Dockerfile, line 3: RUN echo said; exit 3 ended with exit code 3, expected 0\nsaid",
        ),
        ("RUN echo working; sleep 60\n", r"line 2: .* was still running after 2 s; make it faster"),
        ('RUN ["/no/such/program"]\n', r"line 2: RUN /no/such/program cannot be started: .*no/such/program"),
        ("COPY missing.txt /\n", r"line 2: 'missing.txt' is not in the build context"),
        (f"FROM {BASE}\nCOPY --from=0 /missing /\n", r"line 3: .*'/missing' is not in the stage or image"),
        ("COPY --chown=unknown a.txt /\n", r"line 2: .*the image has no user 'unknown'"),
        ("RUN --mount=type=secret,id=key,required=true cat /run/secrets/key\n", r"line 2: .*needs the secret 'key'"),
        ("USER stranger\nRUN true\n", r"line 3: RUN true cannot be started: .*stranger"),
    ],
)
async def test_step_that_fails_names_its_line_and_shows_its_output(builds: Builds, text: str, message: str) -> None:
    dockerfile = written(text, a_txt="a").model_copy(update={"seconds": 2})
    with pytest.raises(SetupFailed, match=message):
        await builds.build(dockerfile)


async def test_secrets_are_in_no_layer(builds: Builds) -> None:
    builds.secrets = {"key": b"s3cret"}
    text = "RUN --mount=type=secret,id=key cat /run/secrets/key | wc -c > /size\nRUN test ! -e /run/secrets/key\n"
    spec = await builds.build(written(text))
    assert await builds.output_of(spec, "cat", "/size") == "6\n"
    assert await builds.output_of(spec, "sh", "-c", "ls /run/secrets 2>/dev/null | wc -l") == "0\n"


async def test_heredocs_are_scripts_and_files(builds: Builds) -> None:
    text = """ENV NAME=world
RUN <<EOF
set -e
echo "hello $NAME" > /hello
EOF
RUN <<EOF
#!/usr/bin/env python3
open("/python", "w").write("from python\\n")
EOF
RUN cat <<A > /both && cat <<-'B' >> /both
first $NAME
A
	second $NAME
	B
COPY <<ONE <<"TWO" /copied/
$NAME
ONE
$NAME
TWO
"""
    spec = await builds.build(written(text))
    paths = ("/hello", "/python", "/both", "/copied/ONE", "/copied/TWO")
    expected = "hello world\nfrom python\nfirst world\nsecond $NAME\nworld\n$NAME\n"
    assert await builds.output_of(spec, "cat", *paths) == expected
    assert await builds.output_of(spec, "sh", "-c", "ls -A /tmp | wc -l") == "0\n"


async def test_settings_become_those_of_the_workspace(builds: Builds) -> None:
    text = 'ENV A=1 PATH=/extra:$PATH\nUSER 33\nWORKDIR /work/here\nENTRYPOINT ["x"]\n'
    spec = await builds.build(written(text))
    assert (spec.env["A"], spec.user, spec.working_dir) == ("1", "33", "/work/here")
    printed = await builds.output_of(spec, "sh", "-c", "echo $A; id -u; pwd; echo $PATH", user=None)
    assert printed.split()[:3] == ["1", "33", "/work/here"]
    assert printed.split()[3].startswith("/extra:/usr")


async def test_mount_hides_what_is_there_and_brings_it_back(builds: Builds) -> None:
    text = """RUN mkdir -p /there && echo kept > /there/file && chown 7:8 /there && chmod 750 /there
RUN --mount=type=cache,target=/there test ! -e /there/file && echo lost > /there/new
RUN --mount=type=cache,target=/new/deep/cache touch /new/deep/cache/x
"""
    spec = await builds.build(written(text))
    printed = await builds.output_of(
        spec, "sh", "-c", "cat /there/*; stat -c '%u:%g %a' /there; ls /new 2>&1 | head -c 3"
    )
    assert printed == "kept\n7:8 750\nls:"


async def test_files_beside_a_mount_in_a_new_folder_are_kept(builds: Builds) -> None:
    text = """RUN --mount=type=cache,target=/made/deep/cache mkdir /made/bin && echo kept > /made/bin/file
RUN --mount=type=cache,target=/both/a --mount=type=cache,target=/both/b true
"""
    spec = await builds.build(written(text))
    printed = await builds.output_of(spec, "sh", "-c", "cat /made/bin/file; ls /made; ls /both 2>&1 | head -c 3")
    assert printed == "kept\nbin\nls:"


async def test_secret_is_hidden_in_the_output_of_a_failed_step(builds: Builds) -> None:
    builds.secrets = {"key": b"s3cret\nlonger line of it\n"}
    text = "RUN --mount=type=secret,id=key cat /run/secrets/key; tail -1 /run/secrets/key >&2; echo said; exit 3\n"
    with pytest.raises(SetupFailed, match="said") as failed:
        await builds.build(written(text))
    assert "longer line" not in str(failed.value)
    assert "s3cret" not in str(failed.value)


async def test_secret_is_an_environment_variable_when_its_mount_names_one(builds: Builds) -> None:
    builds.secrets = {"key": b"s3cret"}
    text = """RUN --mount=type=secret,id=key,env=KEY test "$KEY" = s3cret && test ! -e /run/secrets/key
RUN --mount=type=secret,id=key,env=KEY,target=/file test "$KEY" = "$(cat /file)"
RUN test -z "$KEY"
"""
    await builds.build(written(text))


async def test_layers_of_another_architecture_are_not_used(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    dockerfile = written("RUN uname -m > /machine\n")
    await builds.build(dockerfile)
    builds.made.clear()
    monkeypatch.setattr("agent_runtime.builds.build.this_architecture", lambda: "arm64")
    await builds.build(dockerfile)
    assert len(builds.made) == 1


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, lzma.compress, bytes])
async def test_archive_that_is_too_large_or_damaged_names_its_line(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(trees, "UNPACKED_BYTES", 1 << 20)

    def archive(content: bytes) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            member = tarfile.TarInfo("file")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        return compress(packed.getvalue())

    damaged = archive(random.Random(1).randbytes(1 << 19))
    for data, message in [
        (archive(bytes(2 << 20)), "has more than 1048576 bytes"),
        (damaged[: len(damaged) // 2], "cannot be read"),
    ]:
        file = ContextFile(path="a.tar", content_base64=b64encode(data).decode())
        with pytest.raises(SetupFailed, match=f"line 2: .*{message}"):
            await builds.build(Dockerfile(text=f"FROM {BASE}\nADD a.tar /\n", context=[file]))


async def test_sparse_files_and_absolute_names_of_archives_equal_buildahs(
    builds: Builds, buildah: Buildah, tmp_path: Path
) -> None:
    folder = tmp_path / "context"
    (folder / "out").mkdir(parents=True)
    (folder / ".dockerignore").write_text("out\n")
    with (folder / "out/sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(4 << 20)
        file.write(b"end")
    for form in ("gnu", "posix"):
        command = ["tar", "-S", f"--format={form}", "-C", f"{folder}/out", "-cf", f"{folder}/{form}.tar", "sparse"]
        await asyncio.to_thread(partial(subprocess.run, command, check=True))
    with tarfile.open(folder / "names.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, linked in (("/srv/absolute", ""), ("/srv/linked", "/srv/absolute")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.LNKTYPE if linked else tarfile.REGTYPE), linked
            tar.addfile(member)
    text = f"FROM {BASE}\nADD posix.tar /posix/\nADD names.tar /names/\n"
    assert await _compare(builds, buildah, folder, text) == {}
    # buildah refuses this form.
    (folder / "Dockerfile").write_text(f"{text}ADD gnu.tar /gnu/\nRUN cmp /gnu/sparse /posix/sparse\n")
    await builds.build(dockerfile_of(folder))


@pytest.mark.parametrize("time", ["nan", "inf", "1e5", "-", "9" * 400])
async def test_archive_with_a_time_that_is_no_number_is_unpacked(builds: Builds, time: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("file")
        member.pax_headers = {"mtime": time}
        tar.addfile(member)
    file = ContextFile(path="a.tar", content_base64=b64encode(packed.getvalue()).decode())
    spec = await builds.build(Dockerfile(text=f"FROM {BASE}\nADD a.tar /odd/\n", context=[file]))
    assert await builds.output_of(spec, "ls", "/odd") == "file\n"


async def test_names_of_deletion_markers_are_copied_as_files(builds: Builds, tmp_path: Path) -> None:
    folder = tmp_path / "context"
    (folder / "odd").mkdir(parents=True)
    (folder / "odd/.wh.name").write_text("not a deletion")
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY odd /odd\n")
    spec = await builds.build(dockerfile_of(folder))
    assert await builds.output_of(spec, "cat", "/odd/.wh.name") == "not a deletion"


async def test_base_that_is_missing_is_named(builds: Builds) -> None:
    dockerfile = Dockerfile(text="FROM ./nowhere.tar\nRUN true\n")
    with pytest.raises(SandboxFailure, match=r"image ./nowhere.tar: .*does not exist") as failed:
        await builds.build(dockerfile)
    assert failed.value.reason == "ImageUnavailable"


async def test_plain_workspaces_are_refused(tmp_path: Path, base: str) -> None:
    template = SandboxTemplate.model_validate({"image": base, "workspaces": {"mode": "Plain"}})
    provider = LocalProvider(tmp_path / "run", template, places=1)
    await provider.open()
    try:
        with pytest.raises(SandboxFailure, match="needs workspaces in Overlay mode") as refused:
            await Builds(provider, tmp_path / "out", {BASE: base}).build(written("RUN true\n"))
        assert refused.value.reason == "DockerfileUnsupported"
    finally:
        await provider.close()

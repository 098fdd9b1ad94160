"""Reading of `--mount`."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.dockerfiles.instructions import Mount
from agent_runtime.dockerfiles.mounts import MountError, read_mount


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("type=bind,source=a,target=/b", Mount("", target="/b", source="a")),
        ("from=x,src=a,dst=/b,rw", Mount("", target="/b", source="a", from_="x", read_only=False)),
        ('"source=a,b",destination=/b', Mount("", target="/b", source="a,b")),
        ("TYPE=Cache,target=/b", Mount("", "cache", "/b", read_only=False)),
        (
            "type=cache,target=/b,id=i,sharing=locked,mode=0700,uid=1,gid=2,ro",
            Mount("", "cache", "/b", id="i", sharing="locked", mode=0o700, uid=1, gid=2),
        ),
        ("type=tmpfs,target=/b,size=1.5k", Mount("", "tmpfs", "/b", read_only=False, size=1536)),
        ("type=secret,id=i,required,env=E", Mount("", "secret", id="i", required=True, env="E")),
        ("type=ssh,required=false", Mount("", "ssh")),
    ],
)
def test_mount_is_read(text: str, expected: Mount) -> None:
    mount = read_mount(text)
    assert mount == Mount(**{**vars(expected), "written": text})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("type=x", "type is 'x'"),
        ("target", "has no value"),
        ("targt=/x", "unknown option 'targt'"),
        ("from=$X", "does not expand variables"),
        ("required,type=secret,id=x", "not an option of bind mounts"),
        ("size=1", "not an option of bind mounts"),
        ("type=tmpfs,size=1x", "size is '1x'"),
        ("uid=1", "uid is not an option of bind mounts"),
        ("type=cache,mode=9", "mode is '9'"),
        ("type=cache,uid=" + "9" * 5000, "expected a number"),
        ("ro=2", "expected true or false"),
        ("sharing=shared", "sharing is not an option"),
        ("type=secret", "needs id, source or target"),
        ("type=secret,id=a,source=b", "both id and source"),
        ('source=a"b', "double quote"),
    ],
)
def test_wrong_mount_is_refused(text: str, part: str) -> None:
    with pytest.raises(MountError, match=part):
        read_mount(text)


def test_values_are_expanded() -> None:
    text = "type=cache,target=$T,uid=$U"
    assert (read_mount(text).target, read_mount(text).uid) == ("$T", None)
    mount = read_mount(text, lambda value: {"$T": "/t", "$U": "7"}.get(value, value))
    assert (mount.target, mount.uid) == ("/t", 7)


@given(st.text('type=cahsrvbind,"$uz0129 '))
def test_mounts_are_read_or_refused(text: str) -> None:
    with suppress(MountError):
        read_mount(text)

"""The key of a stored setup: equal for equal preparations of equal roots, and for no others."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.builds.keys import Base, setup_key
from agent_runtime.sandboxes.base import Service, StoredLayer, WorkspaceSpec
from agent_runtime.sandboxes.prepare import preparation, setup_text
from rollout_api.files import Dockerfile, TaskFile
from rollout_api.sandbox import Resources
from rollout_api.services import HealthCheck

BASE = Base("sha256:1 x86_64", {"PATH": "/bin"}, "/app", None, has_one_user=False)
SPEC = WorkspaceSpec(
    group="g1",
    working_dir="/workspace",
    image="base",
    files=[TaskFile(path="a.txt", content="a")],
    setup=["make"],
    network={"setup": "Public"},
)


async def nothing() -> AsyncIterator[bytes]:
    yield b""


class Start:
    name = "start"


def key(spec: WorkspaceSpec = SPEC, below: str = "below", base: Base = BASE) -> str:
    return setup_key(spec, below, base)


INPUTS: Mapping[str, list[Any]] = {
    "working_dir": ["/elsewhere"],
    "user": ["1000", "someone"],
    "env": [{"A": "1"}, {"A": "2"}],
    "network": [{"setup": "None"}, {"setup": ["example.com:443"]}],
    "files": [
        [],
        [TaskFile(path="b.txt", content="a")],
        [TaskFile(path="a.txt", content="b")],
        [TaskFile(path="a.txt", content="a", mode="755")],
        [TaskFile(path="a.txt", content="a"), TaskFile(path="b.txt", content="b")],
    ],
    "setup": [[], ["make "], ["make", "make"], ["make test"]],
    "prepares_for": [[Service("db", SPEC)], [Service("web", SPEC)], [Service("db", SPEC, aliases=["web"])]],
    "working_dir_of_image": [True],
}
"""Other values of the fields on which a setup depends."""

BELOW = {"image", "layers", "is_bare", "dockerfile"}
"""Fields that the key of the step or image below has."""

OTHERS: Mapping[str, Any] = {
    "group": "g2",
    "tenant": "other",
    "resources": Resources(memory="1Gi"),
    "is_build": True,
    "setup_seconds": 5,
    "stores_setup": True,
    "start_seconds": 5,
    "snapshot_paths": ["/data"],
    "start": Start(),
    "alone": True,
    "is_single": True,
    "services": (),
    "volumes": {"v": "/v"},
    "entrypoint": ["run"],
    "command": ["run"],
    "health": HealthCheck(command="true"),
}
"""Other values of the fields on which it does not depend: limits, what comes later, and what only specs without a stored
setup have.
"""


def test_every_field_of_a_spec_is_known_to_be_an_input_or_not() -> None:
    fields = {field.name for field in dataclasses.fields(WorkspaceSpec)}
    assert {*INPUTS, *BELOW, *OTHERS} == fields, "decide whether a stored setup depends on a new field"


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INPUTS.items() for value in values])
def test_setup_key_changes_with_each_input(field: str, value: Any) -> None:
    assert key(dataclasses.replace(SPEC, **{field: value})) != key()


@pytest.mark.parametrize("field", OTHERS)
def test_setup_key_is_equal_for_tasks_that_differ_elsewhere(field: str) -> None:
    assert key(dataclasses.replace(SPEC, **{field: OTHERS[field]})) == key()


def test_network_of_other_phases_does_not_change_the_setup_key() -> None:
    assert key(dataclasses.replace(SPEC, network={"setup": "Public", "agent": "Public"})) == key()


@pytest.mark.parametrize(
    "base", [dataclasses.replace(BASE, env={"PATH": "/usr/bin"}), dataclasses.replace(BASE, user="7:7")]
)
def test_setup_key_changes_with_the_image(base: Base) -> None:
    assert key(base=base) != key()
    assert key(below="another") != key()


def test_working_folder_of_the_image_counts_only_where_it_is_used() -> None:
    other = dataclasses.replace(BASE, working_dir="/other")
    assert key(base=other) == key()
    of_image = dataclasses.replace(SPEC, working_dir_of_image=True)
    assert key(of_image, base=other) != key(of_image)


def specs() -> st.SearchStrategy[WorkspaceSpec]:
    words = st.text("ab\n\x00; ", max_size=3)
    files = st.builds(TaskFile, path=st.sampled_from(["a", "b/a"]), content=words, mode=st.sampled_from(["644", "755"]))
    return st.builds(
        WorkspaceSpec,
        group=st.just("g"),
        working_dir=st.sampled_from(["/a", "/b"]),
        user=st.none() | st.sampled_from(["1", "1:1"]),
        env=st.dictionaries(st.sampled_from(["A", "B"]), words, max_size=2),
        network=st.sampled_from([{}, {"setup": "Public"}, {"setup": ["a:1"]}, {"setup": ["a:1", "b:1"]}]),
        files=st.lists(files, max_size=2),
        setup=st.lists(words, max_size=3),
    )


@given(specs(), specs(), st.sampled_from(["x", "y"]), st.sampled_from(["x", "y"]))
def test_setup_keys_are_equal_only_for_equal_preparations(
    one: WorkspaceSpec, other: WorkspaceSpec, below: str, below_other: str
) -> None:
    is_same = (below, preparation(one)) == (below_other, preparation(other))
    assert (key(one, below) == key(other, below_other)) == is_same


def test_setup_text_is_one_short_line() -> None:
    assert setup_text(SPEC) == "setup: 1 files; make"
    assert setup_text(dataclasses.replace(SPEC, files=[])) == "setup: make"
    assert setup_text(dataclasses.replace(SPEC, setup=[])) == "setup: 1 files"
    text = setup_text(dataclasses.replace(SPEC, setup=["cat <<EOF\nx\nEOF", "y" * 9999]))
    assert text.startswith("setup: 1 files; cat <<EOF x EOF; yyy")
    assert len(text) < 600


def test_dockerfile_and_layers_are_in_the_key_below() -> None:
    layer = StoredLayer("0" * 64, 1, nothing)
    for changes in ({"image": "other"}, {"layers": [layer]}, {"dockerfile": Dockerfile(text="FROM x")}):
        assert key(dataclasses.replace(SPEC, **changes)) == key()

"""Selection of a job's provider."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.sandboxes.factory import image_store, open_provider
from agent_runtime.sandboxes.images.files import ImageError
from rollout_api.rollout_job import RolloutJobSpec


def test_open_provider_does_not_create_the_output_folder(tmp_path: Path) -> None:
    job = RolloutJobSpec.model_validate(
        {"tasks": {"inline": [{"name": "t", "prompt": "p"}]}, "agent": {"type": "Nop"}, "output": {"uri": "./out"}}
    )
    open_provider(job, tmp_path / "run", base_dir=tmp_path)
    assert not (tmp_path / "out").exists()


BASES = {"dockerfiles": {"bases": {"debian:12": "./roots/debian", "x/": "./roots/"}}}
ONE_BASE = {"dockerfiles": {"bases": {"debian:12": "./roots/debian"}}}
TEMPLATE = {"imageTemplate": "./roots/{name}"}
FROM = {"from": {"uri": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("image", "tasks", "is_allowed"),
    [
        ("./home", FROM, False),
        ("{folder}/home", FROM, False),
        ("./roots/../home", FROM | TEMPLATE, False),
        ("./home", FROM | BASES, False),
        ("./home", FROM | {"imageTemplate": "{name}:1"}, False),
        ("./roots/debian-keys", FROM | ONE_BASE, False),
        ("./roots/t", FROM | {"imageTemplate": "./roots/{name}.tar"}, False),
        ("./home", {"stream": {}}, False),
        ("./home", {"branch": [{"job": "./out/x", "index": 0, "turn": 0, "count": 1}]}, False),
        ("./home", {"stream": {}, "folderImages": ["./home"]}, True),
        ("./roots/t", FROM | TEMPLATE, True),
        ("./roots/debian", FROM | BASES, True),
        ("./home", {"inline": [{"name": "t", "prompt": "p", "sandbox": {"image": "./home"}}]}, True),
    ],
)
def test_only_the_author_of_a_job_names_a_folder_of_this_machine_as_an_image(
    tmp_path: Path, image: str, tasks: dict[str, Any], is_allowed: bool
) -> None:
    for folder in ("home", "roots/t", "roots/debian", "roots/debian-keys"):
        (tmp_path / folder).mkdir(parents=True)
    image = image.format(folder=tmp_path)
    job: dict[str, Any] = {"agent": {"type": "Nop"}, "output": {"uri": "./out"}, "tasks": tasks}
    refused = None
    try:
        image_store(RolloutJobSpec.model_validate(job), tmp_path).unpack(image)
    except ImageError as error:
        refused = str(error)
    assert (refused is None) is is_allowed
    assert is_allowed or "which a task of a data set or stream may not name" in str(refused)
    of_job = {**job, "sandbox": {"image": image}}
    assert image_store(RolloutJobSpec.model_validate(of_job), tmp_path).unpack(image).layers

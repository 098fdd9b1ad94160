"""All objects of a ModelServer for review: one file for each spec. ROLLOUT_GOLDEN=write writes them again."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.model_server import objects, pod
from rollout_operator.model_server.plan import control_secret
from tests.unit.rollout_operator.model_server.scenes import CONFIG, SPECS, model_server

FOLDER = Path(__file__).parent / "golden"


def manifests(name: str) -> list[dict[str, Any]]:
    server = model_server(SPECS[name])
    made = [
        control_secret(server),
        *objects.services(server),
        *objects.policies(server, CONFIG),
        *objects.optional_objects(server).values(),
        objects.claim(server),
        objects.download_job(server, CONFIG),
        pod.workload(server, CONFIG),
    ]
    return [body for body in made if body is not None]


@pytest.mark.parametrize("name", SPECS)
def test_objects_change_only_with_the_reviewed_golden_files(name: str) -> None:
    text = yaml.dump_all(manifests(name), Dumper=Plain, sort_keys=False, width=120, allow_unicode=True)
    golden = FOLDER / f"{name}.yaml"
    if os.environ.get("ROLLOUT_GOLDEN") == "write":
        golden.write_text(text)
    assert golden.read_text() == text


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_golden_file_without_a_spec_is_found() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == set(SPECS)

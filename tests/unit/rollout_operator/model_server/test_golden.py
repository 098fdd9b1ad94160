"""What a ModelServer becomes, whole, for review: one file a spec. ROLLOUT_GOLDEN=write writes them anew."""

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
        objects.disruption_budget(server),
        objects.claim(server),
        objects.download_job(server, CONFIG),
        pod.workload(server, CONFIG),
    ]
    return [body for body in made if body is not None]


@pytest.mark.parametrize("name", SPECS)
def test_what_is_made_changes_only_where_somebody_has_looked(name: str) -> None:
    text = yaml.dump_all(manifests(name), Dumper=Plain, sort_keys=False, width=120, allow_unicode=True)
    golden = FOLDER / f"{name}.yaml"
    if os.environ.get("ROLLOUT_GOLDEN") == "write":
        golden.write_text(text)
    assert golden.read_text() == text


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def test_no_file_is_left_of_a_spec_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == set(SPECS)

"""Objects of ModelServers (tests/unit/rollout_operator/model_server/golden), checked by Kubernetes' own schemas."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.chart import ROOT, tool

GOLDEN = sorted((ROOT / "tests/unit/rollout_operator/model_server/golden").glob("*.yaml"))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_api_server_knows_every_field_of_the_objects(golden: Path, schemas: Path) -> None:
    documents = []
    for document in yaml.safe_load_all(golden.read_text()):
        if document["kind"] == "LeaderWorkerSet":  # Its pods are those of Kubernetes all the same.
            for name in ("leaderTemplate", "workerTemplate"):
                template = document["spec"]["leaderWorkerTemplate"][name]
                documents.append({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
        elif document["kind"] != "InferencePool":  # not of Kubernetes itself: tests/e2e/cluster/test_gateway.py
            documents.append(document)
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [tool("kubeconform"), "-strict", "-summary", "-output", "json", "-schema-location", location]
    done = subprocess.run(command, input=yaml.safe_dump_all(documents), capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert not answer.get("resources"), answer["resources"]
    assert answer["summary"] == {"valid": len(documents), "invalid": 0, "errors": 0, "skipped": 0}

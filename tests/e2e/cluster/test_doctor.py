"""The doctor on a real cluster before the first job: it names each problem and its remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import STORAGE_SECRET, Cluster, Object, small_job


class Doctor:
    """Runs `rolloutctl doctor --cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(self, namespace: str, *arguments: str) -> tuple[int, dict[str, list[Object]]]:
        """Run `rolloutctl doctor`; return the exit code, and the findings by subject."""
        done = self._cluster.rolloutctl("doctor", "--cluster", *arguments, "-n", namespace, "-o", "json")
        findings: dict[str, list[Object]] = {}
        for finding in json.loads(done.stdout):
            findings.setdefault(finding["subject"], []).append(finding)
        return done.returncode, findings


@pytest.fixture
def doctor(cluster: Cluster) -> Doctor:
    return Doctor(cluster)


def manifest_file(folder: Path, secret: str, uri: str = "s3://rollouts/doctor") -> str:
    """Write a job whose results go to that URI, with the credentials in that Secret."""
    manifest = small_job("sound", output={"uri": uri, "secretRef": secret})
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return str(path)


def test_healthy_cluster_is_reported_healthy(cluster: Cluster, doctor: Doctor, namespace: str, tmp_path: Path) -> None:
    code, found = doctor(namespace, manifest_file(tmp_path, STORAGE_SECRET))
    assert code == 0, found
    states = {subject: {finding["state"] for finding in findings} for subject, findings in found.items()}
    for subject in ("Kubernetes", "resources", "leader", "Overlay", "image volumes", "admission", "job", "secret"):
        assert states[subject] == {"ok"}, found[subject]
    # There may be a second release beside the cluster's, of a test of the chart: a warning.
    assert "ok" in states["operator"]
    assert states["your rights"] == {"ok"}
    text = cluster.rolloutctl("doctor", "--cluster", "-n", namespace)
    assert (text.returncode, "Jobs can run here." in text.stderr) == (0, True)
    # The check changes nothing: its trial pods were a dry run.
    assert not cluster.list("pods", namespace)


@pytest.mark.full
def test_a_missing_secret_is_found_before_the_job_waits_for_it(doctor: Doctor, namespace: str, tmp_path: Path) -> None:
    code, found = doctor(namespace, manifest_file(tmp_path, "forgotten"))
    assert code == 1
    (finding,) = found["secret"]
    assert (finding["state"], "forgotten" in finding["message"]) == ("fail", True)
    assert f"kubectl -n {namespace} create secret generic forgotten" in finding["advice"]


@pytest.mark.full
def test_laptop_only_settings_are_found_before_the_job_is_applied(
    doctor: Doctor, namespace: str, tmp_path: Path
) -> None:
    code, found = doctor(namespace, manifest_file(tmp_path, STORAGE_SECRET, uri="out"))
    assert code == 1
    (finding,) = found["job"]
    assert (finding["state"], "spec.output.uri: 'out' is a local folder" in finding["message"]) == ("fail", True)


@pytest.mark.full
def test_missing_namespace_is_reported(doctor: Doctor) -> None:
    code, found = doctor("no-such-namespace")
    assert code == 1
    assert [(finding["state"], finding["message"]) for finding in found["admission"]] == [
        ("fail", "the namespace does not exist")
    ]


def test_restricted_namespace_gets_its_jobs_requirements(
    new_namespace: Callable[..., str], doctor: Doctor, tmp_path: Path
) -> None:
    namespace = new_namespace("restricted")
    code, found = doctor(namespace)
    assert code == 0
    told = " ".join(finding["advice"] for finding in found["admission"])
    assert 'sandbox.user to a number, such as "1000"' in told
    assert "jobs run in Plain mode here" in told

    fitting = small_job("fitting", output={"uri": "s3://rollouts/doctor"})
    fitting["spec"]["sandbox"]["user"] = "1000"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(fitting))
    code, found = doctor(namespace, str(tmp_path / "job.yaml"))
    assert "set sandbox.user" not in " ".join(finding["advice"] for finding in found["admission"])


def test_user_with_few_permissions_gets_warnings_and_no_false_failure(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an ordinary user of a team's namespace has: the role `edit` there, and nothing in the cluster.
    cluster.kubectl("create", "serviceaccount", "jane", "-n", namespace)
    cluster.kubectl(
        "create", "rolebinding", "jane", "--clusterrole=edit", f"--serviceaccount={namespace}:jane", "-n", namespace
    )
    token = cluster.kubectl("create", "token", "jane", "-n", namespace).stdout.strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))

    jane = Cluster(tmp_path / "kubeconfig", cluster.environ, cluster.bucket, cluster.details)
    code, found = Doctor(jane)(namespace)
    assert code == 0, found
    for subject in ("operator", "resources"):
        assert {finding["state"] for finding in found[subject]} == {"warn"}
        assert "you may not read" in found[subject][0]["message"]
    assert {finding["state"] for finding in found["your rights"]} == {"ok"}
    assert {finding["state"] for finding in found["admission"]} == {"ok"}

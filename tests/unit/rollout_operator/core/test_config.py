"""The configuration: wrong values are refused with the field's name, before anything is written to the cluster."""

from pathlib import Path

import pytest
import yaml

from rollout_operator.config import load_config

LEAST = {"images": {"runtime": "r:1", "executor": "e:1"}, "lease": {"namespace": "agent-rollouts"}}


def test_minimal_configuration_is_accepted(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, LEAST))
    assert config.watch.namespaces == []
    assert config.lease.renew_deadline_seconds < config.lease.duration_seconds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": {}}, "image: Extra inputs"),
        ({"lease": {}}, "lease.namespace: Field required"),
        ({"workers": 0}, "workers: Input should be greater"),
        ({"watch": {"namespaces": ["Not_A_Name"]}}, "watch.namespaces.0"),
        ({"budgets": {"createsPerSecond": -1}}, "budgets.createsPerSecond"),
        (
            {"lease": {"namespace": "n", "durationSeconds": 10, "renewDeadlineSeconds": 10}},
            "lease.renewDeadlineSeconds (10) must be at least",
        ),
        ({"defaults": {"output": {"url": "s3://x"}}}, "defaults.output.uri: Field required"),
    ],
)
def test_wrong_setting_is_reported_with_its_name(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = _write(tmp_path, LEAST | change)
    with pytest.raises(ValueError, match="^" + str(path)) as error:
        load_config(path)
    assert words in str(error.value)


def test_a_missing_file_says_which_variable_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ROLLOUT_OPERATOR_CONFIG must name the file"):
        load_config(tmp_path / "missing.yaml")


def _write(folder: Path, data: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path

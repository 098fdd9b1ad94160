"""The alerts, run by promtool on series of values."""

import subprocess
from pathlib import Path

import yaml

from tests.support.chart import alerts, tool

CASES = Path(__file__).parent / "alerts.test.yaml"


def test_alerts_fire_when_they_should_and_are_quiet_otherwise() -> None:
    done = subprocess.run([tool("promtool"), "test", "rules", str(CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_firing_and_quiet() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names

"""Access to a cluster: without it, the message says what to install or to set."""

import sys
from pathlib import Path

import pytest

from rolloutctl.cluster_access import connect
from rolloutctl.errors import CommandError

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {}}]
contexts: [{name: mine, context: {cluster: here, user: me, namespace: team}}]
current-context: mine
"""


def use_kubeconfig(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a kubeconfig as KUBECONFIG does, which the package reads only once."""
    for place in ("kubernetes.config", "kubernetes.config.kube_config"):
        monkeypatch.setattr(f"{place}.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


def test_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(CommandError) as refused:
        connect()
    assert refused.value.hint == "pip install 'agent-rollouts[cluster]'"


def test_the_namespace_is_that_of_the_kubeconfigs_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    use_kubeconfig(tmp_path / "config", monkeypatch)
    assert connect() == "team"


def test_missing_cluster_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kubeconfig(tmp_path / "none", monkeypatch)
    with pytest.raises(CommandError, match="no cluster"):
        connect()

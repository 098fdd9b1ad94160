import subprocess
from pathlib import Path

import pytest

from hack.cluster.harness.certificates import control_plane_identities, make_authority, node_identity, sign
from hack.cluster.harness.layout import Layout

LAYOUT = Layout("test", 3)


@pytest.mark.parametrize(
    ("file", "subject"),
    [
        ("admin", "/O=system:masters/CN=admin"),
        ("controller-manager", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
        ("kube-proxy", "/CN=system:kube-proxy"),
    ],
)
def test_certificates_have_the_subjects_that_built_in_roles_expect(file: str, subject: str) -> None:
    assert {identity.file: identity.subject for identity in control_plane_identities(LAYOUT)}[file] == subject


def test_certificate_of_a_kubelet_names_its_node() -> None:
    assert node_identity(LAYOUT.node(1)).subject == "/O=system:nodes/CN=system:node:test-1"


def test_the_api_server_is_trusted_under_every_address_that_it_is_called_by(tmp_path: Path) -> None:
    make_authority(tmp_path)
    server = next(identity for identity in control_plane_identities(LAYOUT) if identity.file == "apiserver")
    sign(tmp_path, server)
    for address in (LAYOUT.node(0).address, LAYOUT.api_service, "127.0.0.1"):
        command = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_ip", address, "apiserver.crt"]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0, address
    refused = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_ip", "10.0.0.1", "apiserver.crt"]
    assert subprocess.run(refused, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    assert (tmp_path.stat().st_mode & 0o077) == 0

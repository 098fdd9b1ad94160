"""The registry `docker-registry` on a temporary folder. It requires a name and a password."""

import base64
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_port, wait_for_port

SCRIPT = Path(__file__).parents[2] / "hack" / "docker-registry"
# bcrypt, the one form that it takes, with the fewest rounds.
PASSWORD, HASH = "a password", "$2b$04$1MFgLpjSfIL5BdUn0.4fF.WaZIspLclMEBse/BmBkCf43Hc1udoAe"
CONFIGURATION = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/images}}}}
http: {{addr: "{host}"}}
auth: {{htpasswd: {{realm: test, path: {folder}/users}}}}
"""


@dataclass(frozen=True)
class DockerRegistry:
    """A running registry, by plain HTTP on the loopback."""

    host: str
    folder: Path

    def images(self) -> list[str]:
        """Return what was pushed, as `name:tag`."""
        root = self.folder / "images/docker/registry/v2/repositories"
        tags = (path.relative_to(root).parts for path in root.rglob("_manifests/tags/*"))
        return sorted(f"{'/'.join(parts[:-3])}:{parts[-1]}" for parts in tags if parts[-2] == "tags")

    def writes(self) -> int:
        """Return the number of requests so far that could change something."""
        lines = (self.folder / "log").read_text().splitlines()
        return sum(any(f'"{method} /v2/' in line for method in ("POST", "PATCH", "PUT")) for line in lines)

    def machine(self, folder: Path) -> dict[str, str]:
        """Return the environment of a machine without images, whose user has logged in, and whose tools speak HTTP to
        it.
        """
        configured = folder / ".config/containers"
        configured.mkdir(parents=True)
        (configured / "registries.conf").write_text(f'[[registry]]\nlocation = "{self.host}"\ninsecure = true\n')
        storage = f'driver = "vfs"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        (folder / "storage.conf").write_text(f"[storage]\n{storage}")
        login = {"auths": {self.host: {"auth": base64.b64encode(f"tester:{PASSWORD}".encode()).decode()}}}
        (folder / ".docker").mkdir()
        (folder / ".docker/config.json").write_text(json.dumps(login))
        return {**os.environ, "HOME": str(folder), "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}


@contextlib.contextmanager
def serve_docker_registry() -> Iterator[DockerRegistry]:
    """Serve an empty registry, whose program is fetched first if missing."""
    program = subprocess.run([SCRIPT], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="docker-registry-") as name:
        folder = Path(name)
        port = free_port()
        (folder / "users").write_text(f"tester:{HASH}\n")
        (folder / "config.yml").write_text(CONFIGURATION.format(folder=folder, host=f"127.0.0.1:{port}"))
        with (folder / "log").open("w") as log:
            server = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_port(port, server, folder / "log")
            yield DockerRegistry(f"127.0.0.1:{port}", folder)
        finally:
            server.terminate()
            server.wait(10)

"""The viewer behind a real ingress: Contour and Envoy in front, and oauth2-proxy, which asks for a user and a password."""

import asyncio
import base64
import hashlib
import json
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from agent_runtime.recording.store import Store
from hack.cluster.harness.build import build_one
from hack.cluster.harness.recipes import CONTOUR, OAUTH2_PROXY
from rolloutctl.viewer.rollout import Rollout
from tests.support.browser import Page, open_in_browser
from tests.support.cluster import QUICKSTART_IMAGE, STORAGE_SECRET, Cluster, Object
from tests.support.gateway import envoy_program
from tests.support.made_up_runs import made_up_rollout, write_rollout, write_run
from tests.support.release import Release

pytestmark = [pytest.mark.alone, pytest.mark.full]  # it adds kinds to the cluster, for all

HOST, PORT, LOGIN_PORT = "rollouts.example", 8443, 4180
USER, PASSWORD = "ada", "correct horse"
CONTROLLER, INGRESS, LOGIN = "projectcontour", "ingress", "oauth2-proxy"
RESPONSE_SECONDS = 15
"""Contour cuts every answer after this time."""


@pytest.fixture
def contour(cluster: Cluster) -> Iterator[None]:
    if not cluster.details:
        pytest.skip("this test adds to the cluster itself, which only the harness (hack/cluster) lets it do")
    cluster.node_process("addon", "start", "contour")
    yield
    cluster.node_process("addon", "stop", "contour")


def test_a_live_run_is_followed_through_an_ingress_that_authenticates(
    cluster: Cluster, release: Release, load_image: Callable[..., str], contour: None, tmp_path: Path
) -> None:
    place = f"s3://{cluster.bucket}/{release.namespace}/runs"
    rollouts = [made_up_rollout(index, hostile=False) for index in range(16)]
    folder = write_run(tmp_path / "runs", "live", rollouts[:2], group_size=4, finished=False, total=16)
    copied = Copied(folder, Store.open(f"{place}/{folder.name}", cluster.environ))
    asyncio.run(copied.upload())

    start_login(
        cluster, release.namespace, load_image("oauth2-proxy", {"/oauth2-proxy": build_one(OAUTH2_PROXY.name, print)})
    )
    certificate(cluster, release.namespace, tmp_path)
    values = {
        "enabled": "true",
        "output.uri": place,
        "output.secretRef": STORAGE_SECRET,
        "resources.requests.cpu": "50m",
        "fromNamespaces": f"{{{release.namespace}}}",
        "ingress.enabled": "true",
        "ingress.className": "contour",
        "ingress.annotations.projectcontour\\.io/response-timeout": f"{RESPONSE_SECONDS}s",
        "ingress.host": HOST,
        "ingress.tlsSecret": "tls",
        "ingress.service": LOGIN,
        "ingress.servicePort": str(LOGIN_PORT),
    }
    release.upgrade(*(f"viewer.{name}={value}" for name, value in values.items()))
    start_contour(cluster, release.namespace)
    pod = cluster.get("pod", INGRESS, CONTROLLER)
    assert pod is not None
    asyncio.run(read(cluster, pod["status"]["podIP"], folder.name, copied, rollouts))


class Copied:
    """A run's folder on this machine, and its copy in the cluster's storage."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self._store = store
        self._keys: set[str] = set()

    async def upload(self) -> None:
        """Upload what is new; seals last, as the engine writes them."""
        files = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        for key in sorted(files.keys() - self._keys, key=lambda key: (key.startswith("seals/"), key)):
            await self._store.put(key, files[key].read_bytes())
        self._keys |= files.keys()


async def read(cluster: Cluster, address: str, folder: str, copied: Copied, rollouts: list[Rollout]) -> None:
    """Read the pages through the ingress as a user does."""
    await wait_served(cluster, address)
    url = f"https://{HOST}:{PORT}/"
    flags = (f"--host-resolver-rules=MAP {HOST} {address}", "--ignore-certificate-errors")
    rows = "document.querySelectorAll('.virtual tbody tr').length"
    async with open_in_browser(url, *flags) as tab:
        assert await tab.run("document.querySelector('#app') === null"), "without a login there are no pages"
        await log_in(tab)
        await tab.until("document.querySelectorAll('#runs tbody tr').length === 1")
        await tab.run(f"location.hash = '/run/{folder}'")
        await tab.until(f"{rows} === 2")
        # Longer than the ingress lets an answer last, so it cuts the events in between.
        loop = asyncio.get_running_loop()
        began, index = loop.time(), 2
        while loop.time() - began < RESPONSE_SECONDS + 6:
            write_rollout(copied.folder, rollouts[index])
            await copied.upload()
            stored = loop.time()
            index += 1
            await tab.until(f"{rows} === {index}")
            print(f"shown {loop.time() - stored:.2f} s after it was stored")
            await asyncio.sleep(1.7)
        await tab.call("Network.clearBrowserCookies")
        await tab.run(f"location.hash = '/run/{folder}/rollout/1'")
        await tab.until("document.querySelector('main').textContent.includes('Your login may have expired')")
        await tab.call("Page.reload")
        await tab.until("document.querySelector('#app') === null && document.querySelector('form') !== null")
        await log_in(tab)
        await tab.until("document.querySelector('#app') !== null")


async def log_in(tab: Page) -> None:
    await tab.until("document.querySelector('input[type=password]') !== null")
    await tab.run(
        f"document.querySelector('input[name=username]').value = {json.dumps(USER)};"
        f"document.querySelector('input[name=password]').value = {json.dumps(PASSWORD)};"
        "document.querySelector('input[type=password]').form.submit()"
    )


async def wait_served(cluster: Cluster, address: str) -> None:
    """Wait until the ingress serves the host, and check what it answers without a browser."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as http:

        async def ask(path: str, *, host: str = HOST, password: str = "") -> int:
            url = f"https://{address}:{PORT}{path}"
            headers = {"Host": host}
            if password:
                headers["Authorization"] = aiohttp.encode_basic_auth(USER, password)
            try:
                async with http.get(url, headers=headers, server_hostname=HOST, allow_redirects=False) as answer:
                    await answer.read()
                    return answer.status
            except aiohttp.ClientError:
                return 0

        async with asyncio.timeout(120):
            while await ask("/ping") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        assert [await ask("/"), await ask("/api/runs"), await ask("/app.js")] == [403, 401, 403]
        assert await ask("/api/runs", password="wrong") == 401
        assert [await ask("/", password=PASSWORD), await ask("/api/runs", password=PASSWORD)] == [200, 200]
        assert await ask("/api/runs", host="other.example", password=PASSWORD) in (404, 421), "the Ingress has one host"


def certificate(cluster: Cluster, namespace: str, folder: Path) -> None:
    """Make the Secret with the certificate of the host."""
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}")
    files = ("-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ("tls.key", "tls.crt")}
    metadata = {"name": "tls", "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
    )


def start_login(cluster: Cluster, namespace: str, image: str) -> None:
    """Start oauth2-proxy in front of the release's viewer, with a file of passwords instead of an identity provider."""
    digest = base64.b64encode(hashlib.sha1(PASSWORD.encode()).digest()).decode()
    arguments = [
        f"--http-address=0.0.0.0:{LOGIN_PORT}",
        f"--upstream=http://second-viewer.{namespace}.svc",
        "--htpasswd-file=/config/htpasswd",
        "--api-route=^/api/",
        "--reverse-proxy=true",
        "--email-domain=*",
        "--provider=github",
        "--client-id=none",
        "--client-secret=none",
        f"--cookie-secret={'0' * 32}",
    ]
    metadata: Object = {"name": LOGIN, "namespace": namespace, "labels": {"app": LOGIN}}
    container = {
        "name": LOGIN,
        "image": image,
        "command": ["/oauth2-proxy", *arguments],
        "readinessProbe": {"httpGet": {"path": "/ping", "port": LOGIN_PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"htpasswd": f"{USER}:{{SHA}}{digest}\n"},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": {"app": LOGIN}, "ports": [{"port": LOGIN_PORT}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "containers": [container],
                "volumes": [{"name": "config", "configMap": {"name": LOGIN}}],
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
            },
        },
    )


def start_contour(cluster: Cluster, watched: str) -> None:
    """Start Contour and Envoy in one pod, from programs of its node. It serves the Ingresses of one namespace."""
    folders = {"contour": build_one(CONTOUR.name, print).parent, "envoy": envoy_program().parent}
    mounts = [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in folders]
    mounts.append({"name": "config", "mountPath": "/config"})
    xds = ("--xds-address=127.0.0.1", "--xds-port=8001")
    serve = (
        *("serve", "--incluster", "--insecure", *xds, "--disable-leader-election"),
        *(f"--watch-namespaces={watched}", f"--ingress-status-address={HOST}"),
    )
    bootstrap = (
        "bootstrap",
        "/config/envoy.json",
        *xds,
        "--admin-address=/config/admin.sock",
        f"--namespace={CONTROLLER}",
    )

    def container(name: str, *command: str) -> Object:
        variable = {"name": "CONTOUR_NAMESPACE", "value": CONTROLLER}
        return {
            "name": name, "image": QUICKSTART_IMAGE, "command": [*command], "env": [variable], "volumeMounts": mounts
        }  # fmt: skip

    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": INGRESS, "namespace": CONTROLLER},
            "spec": {
                "serviceAccountName": "contour",
                "terminationGracePeriodSeconds": 0,
                "initContainers": [container("bootstrap", "/contour/contour", *bootstrap)],
                "containers": [
                    container("contour", "/contour/contour", *serve),
                    container("envoy", "/envoy/envoy", "-c", "/config/envoy.json", "-l", "error", "--service-cluster",
                              CONTROLLER, "--service-node", INGRESS),
                ],
                "volumes": [
                    {"name": "config", "emptyDir": {}},
                    *({"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()),
                ],
            },
        },
    )  # fmt: skip
    done = cluster.kubectl(
        "wait", "--for=condition=Ready", "pod", INGRESS, "-n", CONTROLLER, "--timeout=90s", check=False
    )
    logs = cluster.kubectl("logs", INGRESS, "-n", CONTROLLER, "--all-containers", "--tail=40", check=False).stdout
    assert done.returncode == 0, logs

"""A process in a sandbox can reach no other server, and finds no credentials."""

import functools
import http.server
import json
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from rollout_api.cluster import EXECUTOR_PORT, RUNNER_METRICS_PORT, runner_name, token_sha256
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually, storage_secret
from tests.support.sandboxes import ByHand, secret_value
from tests.support.scripted import scripted_job, turn

MODES = ["Overlay", "Plain"]
MODEL_KEY = f"sk-{secrets.token_hex(16)}"
WEB_PORT = 8000
METADATA = "169.254.169.254"
# Answers every request with a greeting, and is a model that keeps the agent of its job running.
WEB_SERVER = """
import http.server, json
SLEEP = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": "sleep 100"})}}
ANSWER = {
    "choices": [{"message": {"role": "assistant", "tool_calls": [SLEEP]}, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"hello")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps(ANSWER).encode())
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""

# Tries every target directly, and through the proxy where there is one. Prints what was reached.
PROBE = r"""
import json, os, socket, sys, threading
from urllib.parse import urlsplit
reached = set()
def direct(name, host, port):
    socket.create_connection((host, port), timeout=5).close()
    reached.add(name)
def through_the_proxy(name, host, port):
    proxy = urlsplit(os.environ["HTTP_PROXY"])
    with socket.create_connection((proxy.hostname, proxy.port), timeout=5) as connection:
        connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
        if b" 200 " in connection.recv(100):
            reached.add(name)
def by_datagram(name, host, port):
    query = b"\1\2\1\0\0\1\0\0\0\0\0\0\12kubernetes\7default\3svc\7cluster\5local\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(5)
        asking.sendto(query, (host, port))
        if asking.recv(100):
            reached.add(name)
def quietly(way, *target):
    try:
        way(*target)
    except OSError:
        pass
threads = []
for name, address in json.loads(sys.argv[1]).items():
    host, _, port = address.rpartition(":")
    ways = [by_datagram] if "datagram" in name else [direct]
    if "HTTP_PROXY" in os.environ:
        ways.append(through_the_proxy)
    threads += [threading.Thread(target=quietly, args=(way, name, host, int(port))) for way in ways]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(sorted(reached)))
"""

# Searches for secrets and prints where they are. They are given reversed, so that the search does not find its own
# arguments. One is planted first, so that a search that finds nothing at all is noticed.
SEARCH = r"""
import json, os, re, stat, sys
secrets = [text[::-1].encode() for text in json.loads(sys.argv[1])]
with open("/tmp/planted", "wb") as file:
    file.write(b"a line\n" + secrets[0])
paths = [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit() for name in ("environ", "cmdline")]
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev")]
    paths += [os.path.join(folder, name) for name in names]
found = [name for name in os.environ if re.search("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", name)]
found += [path for path in ("/run/secrets/kubernetes.io", "/root/.kube", "/root/.aws") if os.path.exists(path)]
for path in paths:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            continue
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        continue
    if any(secret in content for secret in secrets):
        found.append(path)
os.unlink("/tmp/planted")
print(json.dumps(found))
"""

# Sends tokens to the executor from the same container. Prints the status for each.
ASK = """
import http.client, json, sys
answers = []
for token in json.loads(sys.argv[1]):
    connection = http.client.HTTPConnection("127.0.0.1", 8470, timeout=10)
    connection.request("GET", "/v1/health", headers={"Authorization": f"Bearer {token}"} if token else {})
    answers.append(connection.getresponse().status)
print(json.dumps(answers))
"""


def pod(name: str, namespace: str, code: str) -> Object:
    """Run a Python program in a pod of the namespace. A pod with a web server is ready when it answers."""
    container: Object = {"name": "main", "image": QUICKSTART_IMAGE, "command": ["python3", "-c", code]}
    if code == WEB_SERVER:
        container["readinessProbe"] = {"httpGet": {"path": "/", "port": WEB_PORT}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def service(name: str, namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "ports": [{"port": WEB_PORT}]},
    }


def pod_address(cluster: Cluster, name: str, namespace: str) -> str:
    """Return the address of a running pod."""
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "-n", namespace, "--timeout=120s")
    found = cluster.get("pod", name, namespace)
    assert found is not None
    return str(found["status"]["podIP"])


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def web_server(address: str, port: int = 0) -> Iterator[str]:
    """Run a web server on this machine. Yields its `address:port`."""
    with http.server.ThreadingHTTPServer((address, port), _Hello) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.1))
        thread.start()
        try:
            yield f"{address}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def metadata_service() -> Iterator[str]:
    """Run a web server at the address where clouds serve credentials."""
    where = ("dev", "lo")
    subprocess.run(["ip", "address", "replace", f"{METADATA}/32", *where], check=True)
    try:
        with web_server(METADATA, 80) as address:
            yield address
    finally:
        subprocess.run(["ip", "address", "del", f"{METADATA}/32", *where], check=True)


@dataclass(frozen=True)
class Surroundings:
    """A job that runs in each mode, its model, and other servers that its sandboxes must not reach."""

    cluster: Cluster
    namespace: str
    jobs: Mapping[str, Job]
    targets: Mapping[str, str]
    """Addresses that must not be reachable: `address:port` by name."""

    def sandbox(self, mode: str) -> ByHand:
        """Return a sandbox of the job in that mode, which in Overlay has a free place."""
        return ByHand(self.cluster, self.namespace, self.jobs[mode].sandboxes()[0]["metadata"]["name"])

    def in_workspace(self, mode: str, *command: str) -> str:
        """Return a command's output in a workspace. In Plain, whose only place is taken, run it in the container
        itself.
        """
        if mode == "Overlay":
            return self.sandbox(mode).run(*command, workspace="intruder")
        return self.in_container(mode, *command)

    def in_container(self, mode: str, *command: str) -> str:
        """Return the output of a command in the executor's container."""
        done = self.sandbox(mode).run_in_container(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout


def job_at_work(surroundings_of: str, mode: str, model: str, output: Object) -> Object:
    """Return a job whose runner holds the keys of a model and of the storage, and whose tool sleeps."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": mode.lower(), "namespace": surroundings_of},
        "spec": {
            "mode": "Eval",
            "sandbox": {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode, "perSandbox": 2}},
            "tasks": {"inline": [{"name": "t", "prompt": "p", "verifier": {"commands": ["true"]}}]},
            "model": {
                "endpoint": {
                    "baseURL": f"http://{model}/v1",
                    "name": "m",
                    "apiKeyFrom": {"secretKeyRef": {"name": "model", "key": "key"}},
                }
            },
            "output": output,
        },
    }


@pytest.fixture(scope="module")
def around(cluster: Cluster) -> Iterator[Surroundings]:
    namespace = f"isolation-{secrets.token_hex(3)}"
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    with ExitStack() as stack:
        stack.callback(cluster.kubectl, "delete", "namespace", namespace, "--wait=false")
        cluster.apply(
            storage_secret(cluster, namespace),
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "model", "namespace": namespace},
                "stringData": {"key": MODEL_KEY},
            },
            pod("model", namespace, WEB_SERVER),
            service("model", namespace),
            pod("witness", namespace, "import time; time.sleep(3600)"),
        )
        neighbour = ByHand(cluster, namespace, "neighbour").apply(clients={"matchLabels": {"app": "witness"}})
        model = f"{pod_address(cluster, 'model', namespace)}:{WEB_PORT}"
        output = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": "storage"}
        jobs = {mode: Job(cluster, namespace, job_at_work(namespace, mode, model, output)).apply() for mode in MODES}
        runners = {mode: _at_work(job) for mode, job in jobs.items()}
        neighbour.wait_ready()
        pod_address(cluster, "witness", namespace)

        targets = _control_plane(cluster) | {
            "model": model,
            "model's service": f"{_service_address(cluster, 'model', namespace)}:{WEB_PORT}",
            "object storage": urlsplit(cluster.environ["AWS_ENDPOINT_URL"]).netloc,
            "executor of another sandbox": f"{neighbour.address}:{EXECUTOR_PORT}",
            **{f"runner ({mode})": f"{address}:{RUNNER_METRICS_PORT}" for mode, address in runners.items()},
        }
        if cluster.details:  # only the cluster on this machine reaches addresses of this machine
            targets["internet"] = stack.enter_context(web_server(cluster.details["internet"]["address"]))
            targets["metadata"] = stack.enter_context(metadata_service())
        yield Surroundings(cluster, namespace, jobs, targets)


def _at_work(job: Job) -> str:
    """Return the runner's address once its rollout runs in a sandbox."""

    def address() -> str | None:
        ready = [found for found in job.sandboxes() if found.get("status", {}).get("podIP")]
        runners = job.pods("runner")
        return str(runners[0]["status"].get("podIP", "")) or None if ready and runners else None

    return eventually(address, 120, job.describe)


def _service_address(cluster: Cluster, name: str, namespace: str) -> str:
    found = cluster.get("service", name, namespace)
    assert found is not None
    return str(found["spec"]["clusterIP"])


def _control_plane(cluster: Cluster) -> dict[str, str]:
    """Return API server, kubelet and resolver by each of their addresses."""
    (slice_,) = cluster.list("endpointslices", "default", "kubernetes.io/service-name=kubernetes")
    node = cluster.list("nodes", "default")[0]
    node_address = next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")
    resolver = _service_address(cluster, "kube-dns", "kube-system")
    return {
        "API server": f"{_service_address(cluster, 'kubernetes', 'default')}:443",
        "API server's own address": f"{slice_['endpoints'][0]['addresses'][0]}:{slice_['ports'][0]['port']}",
        "kubelet": f"{node_address}:10250",
        "resolver": f"{resolver}:53",
        "resolver by datagram": f"{resolver}:53",
    }


def test_every_forbidden_target_is_reachable_without_a_sandbox(around: Surroundings) -> None:
    """Otherwise the test would also pass on a cluster where no server answers."""
    command = ("exec", "witness", "-n", around.namespace, "--", "python3", "-c", PROBE, json.dumps(around.targets))
    wanted, reached = sorted(around.targets), [""]

    def all_reached() -> bool | None:
        reached[:] = json.loads(around.cluster.kubectl(*command).stdout)
        return reached == wanted or None

    def describe() -> str:
        return f"not reached: {set(wanted) - set(reached)}\n{around.jobs['Plain'].describe()}"

    # A NetworkPolicy of a pod that has just started may take some seconds to apply.
    eventually(all_reached, 60, describe)


@pytest.mark.parametrize("mode", MODES)
def test_tool_reaches_no_target(around: Surroundings, mode: str) -> None:
    probe = ("python3", "-c", PROBE, json.dumps(around.targets))
    assert json.loads(around.in_workspace(mode, *probe)) == []
    # The pod itself reaches nothing either, so a program that leaves its workspace would gain nothing.
    assert json.loads(around.in_container(mode, *probe)) == []


# Asks its model, as an agent inside of the sandbox does.
ASK_MODEL = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hello"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print(answer["choices"][0]["finish_reason"])
"""


@pytest.mark.parametrize("mode", MODES)
def test_agent_inside_reaches_only_its_model(around: Surroundings, mode: str) -> None:
    model, output = around.targets["model"], around.jobs[mode].manifest["spec"]["output"]
    manifest = job_at_work(around.namespace, mode, model, output)
    manifest["metadata"]["name"] = f"inside-{mode.lower()}"
    files = [{"path": "ask.py", "content": ASK_MODEL}, {"path": "probe.py", "content": PROBE}]
    verifier = {"commands": ["cat told.txt"]}
    manifest["spec"]["tasks"] = {"inline": [{"name": "t", "prompt": "p", "files": files, "verifier": verifier}]}
    program = 'python3 ask.py > told.txt; python3 probe.py "$0" >> told.txt'
    manifest["spec"]["agent"] = {"type": "Command", "command": ["sh", "-c", program, json.dumps(around.targets)]}
    job = Job(around.cluster, around.namespace, manifest).apply()
    job.wait("Succeeded")
    (told,) = json.loads(job.read("seals/0.json"))["verdict"]["commands"]
    assert told["output"].split() == ["tool_calls", "[]"]


@pytest.mark.parametrize("mode", MODES)
def test_public_network_excludes_the_cluster(around: Surroundings, mode: str) -> None:
    sandbox = ByHand(around.cluster, around.namespace, f"public-{mode.lower()}")
    sandbox.apply(workspaces={"mode": mode}, network={"agent": "Public"}).wait_ready()
    probe = ("python3", "-c", PROBE, json.dumps(around.targets))
    resolver = ["resolver", "resolver by datagram"]
    assert json.loads(sandbox.run(*probe)) == ([] if mode == "Overlay" else resolver)
    assert json.loads(sandbox.run_in_container(*probe).stdout) == resolver


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_finds_no_credential(around: Surroundings, mode: str) -> None:
    job, sandbox = around.jobs[mode], around.sandbox(mode)
    key = secret_value(around.cluster, around.namespace, runner_name(job.name), "key")
    wanted = [sandbox.token_by(key), key, MODEL_KEY, around.cluster.environ["AWS_SECRET_ACCESS_KEY"]]
    search = ("python3", "-c", SEARCH, json.dumps([text[::-1] for text in wanted]))
    assert json.loads(around.in_workspace(mode, *search)) == ["/tmp/planted"]
    assert json.loads(around.in_container(mode, *search)) == ["/tmp/planted"]


@pytest.mark.parametrize("mode", MODES)
def test_tool_cannot_find_its_executors_token(around: Surroundings, mode: str) -> None:
    job, sandbox = around.jobs[mode], around.sandbox(mode)
    token = sandbox.token_by(secret_value(around.cluster, around.namespace, runner_name(job.name), "key"))
    digest, uid = token_sha256(token), sandbox.object["metadata"]["uid"]
    # Values that a program may know about its pod, tried as tokens and as keys of tokens.
    known = ["", sandbox.name, uid, digest, f"{sandbox.name}/{uid}"]
    guesses = [*known, *map(sandbox.token_by, known), *map(token_sha256, known)]
    answers = json.loads(around.in_container(mode, "python3", "-c", ASK, json.dumps([*guesses, token])))
    assert answers == [401] * len(guesses) + [200]


# The listed host may answer slowly on a busy machine; refused hosts may never answer.
FETCH = """
import sys, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
def fetch(url, patience):
    end = time.monotonic() + patience
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).read().decode()
        except urllib.error.HTTPError as error:
            # The proxy's refusal is final. A busy machine's name server may have no answer at first.
            if error.code == 403 or time.monotonic() > end:
                return "no" if error.code == 403 else f"{error.code}:{error.read()}".replace(" ", "_")
        except OSError:
            if time.monotonic() > end:
                return "no"
        time.sleep(1)
listed, *others = sys.argv[1:]
print(*ThreadPoolExecutor().map(fetch, [listed, *others], [60, *[0 for _ in others]]))
"""


@pytest.mark.parametrize(
    ("mode", "by_name"), [pytest.param("Overlay", False, marks=pytest.mark.full), ("Overlay", True), ("Plain", False)]
)
def test_address_listed_for_one_phase_is_reached_only_there(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], mode: str, by_name: bool
) -> None:
    names = ["listed", "unlisted"]
    cluster.apply(*(pod(name, namespace, WEB_SERVER) for name in names))
    cluster.apply(*(service(name, namespace) for name in names))
    addresses = [pod_address(cluster, name, namespace) for name in names]
    hosts = [f"{name}.{namespace}.svc.cluster.local" for name in names] if by_name else addresses
    network = {"agent": [f"{hosts[0]}:{WEB_PORT}"]}
    # Another host at the listed port, and another port of the listed host.
    fetch = " ".join(
        ["python3 fetch.py", *(f"http://{host}:{WEB_PORT}/" for host in hosts), f"http://{hosts[0]}:8001/"]
    )
    task = {
        "name": "fetch",
        "prompt": "Fetch it.",
        "files": [{"path": "fetch.py", "content": FETCH}],
        "setup": [f"{fetch} > setup.txt"],
        "verifier": {"commands": [f"cat setup.txt agent.txt; {fetch}"]},
    }
    members = {"fetches": [turn(f"{fetch} > agent.txt"), {"content": "done"}]}
    sandbox = {"image": QUICKSTART_IMAGE, "workspaces": {"mode": mode}, "network": network}
    job = new_job(scripted_job("phases", [task], members, sandbox=sandbox)).apply()
    job.wait("Succeeded")
    (command,) = json.loads(job.read("seals/0.json"))["verdict"]["commands"]
    open_, closed = ["hello", "no", "no"], ["no", "no", "no"]
    if mode == "Overlay":
        assert command["output"].split() == closed + open_ + closed
    else:
        # NetworkPolicies do not distinguish phases, and the Sandbox reports that.
        assert command["output"].split() == open_ * 3
        told = ByHand(cluster, namespace, "told").apply(workspaces={"mode": mode}, network=network).wait_ready()
        assert "destinations of one phase are open in all phases" in told.condition("Overlay")["message"]

"""The escape test of the executor's integration tests in real pods: a hostile tool call reaches nothing, in either
mode.
"""

from pathlib import Path

import pytest

from rollout_api.cluster import EXECUTOR_PATH
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.sandboxes import ByHand

USERS = ["0", pytest.param("1234:1234", marks=pytest.mark.full)]  # whatever a user may do, root may
HOSTILE = REPOSITORY / "tests/integration/executor_workspaces/hostile.py"
MARK = "a-neighbours-secret"
PORT = 8123
SERVER = (
    "import socket, sys\n"
    f"server = socket.create_server(('127.0.0.1', {PORT}))\n"
    "while True:\n    connection = server.accept()[0]\n    connection.sendall(sys.argv[1].encode())\n    connection.close()"
)
CLIENT = f"import socket; print(socket.create_connection(('127.0.0.1', {PORT})).recv(99).decode())"

# Successes in the script's view that are no escape from a pod.
NO_ESCAPE = {
    "signal_the_executor": "process 1 may be named: it hears no signal from inside its PID namespace, which kill_init tries",
    "be_root_on_the_machine": "the id map cannot be judged from inside; test_root_in_the_container_… does",
    "read_what_is_masked": "nothing is masked in a pod: its root is the task's own image",
    "undo_a_mask": "nothing is masked in a pod",
}
NO_ESCAPE_FROM_PLAIN = NO_ESCAPE | {
    "have_another_network_interface": "the pod's own; test_isolation.py tries what can be reached through it",
    "find_the_layers_of_others": "the pod's own volume; nobody else is in the pod",
}

# kubectl exec as the container's user: root there, beside the executor, outside of every workspace.
AS_ROOT_BESIDE_THE_EXECUTOR = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
worked = []
for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGSEGV"):
    os.kill(1, getattr(signal, name))
if libc.ptrace(16, 1, None, None) == 0 or libc.ptrace(0x4206, 1, None, None) == 0:
    worked.append("traced")
for name in ("mem", "maps", "environ", "auxv", "stack", "syscall", "exe", "root/etc/passwd", "cwd/etc"):
    try:
        descriptor = os.open(f"/proc/1/{name}", os.O_RDONLY)
        if os.read(descriptor, 16) if not name.endswith("etc") else True:
            worked.append(name)
    except OSError:
        pass
for number in range(20):
    if libc.syscall(438, os.pidfd_open(1), number, 0) >= 0:
        worked.append(f"descriptor {number}")
class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
buffer = ctypes.create_string_buffer(16)
local, remote = Vector(ctypes.addressof(buffer), 16), Vector(0x400000, 16)
if libc.process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0 or ctypes.get_errno() == 14:
    worked.append("memory")
print(worked)
"""


def attack(sandbox: ByHand) -> dict[str, str]:
    """Return what the hostile script could reach from a workspace, by attempt."""
    sandbox.copy_in(HOSTILE, "/tmp/hostile.py")
    # The mark is given in pieces, so that the search does not find the script's own arguments.
    said = sandbox.run(
        "sh",
        "-c",
        f"exec python3 /tmp/hostile.py {PORT} $(printf %s%s a-neighbours -secret) 1 {EXECUTOR_PATH}/executor",
    )
    return {name: got for name, _, got in (line.partition(": ") for line in said.splitlines()) if name != "held"}


@pytest.mark.parametrize("user", USERS)
def test_workspace_in_an_overlay_pod_cannot_escape(cluster: Cluster, namespace: str, user: str, tmp_path: Path) -> None:
    sandbox = ByHand(cluster, namespace, "hostile")
    sandbox.apply(user=user, workspaces={"mode": "Overlay", "perSandbox": 2}).wait_ready()
    (tmp_path / "secret").write_text(MARK)
    sandbox.copy_in(tmp_path / "secret", "/tmp/secret", workspace="neighbour")
    sandbox.run("sh", "-c", f'python3 -c "{SERVER}" {MARK} >/dev/null 2>&1 &', workspace="neighbour")

    got = attack(sandbox)
    assert got.keys() <= NO_ESCAPE.keys(), got

    assert sandbox.run("cat", "/tmp/secret", workspace="neighbour") == MARK
    assert sandbox.run("python3", "-c", CLIENT, workspace="neighbour") == f"{MARK}\n"
    sandbox.assert_unharmed()


@pytest.mark.parametrize("user", USERS)
def test_workspace_in_a_plain_pod_cannot_escape(cluster: Cluster, namespace: str, user: str) -> None:
    sandbox = ByHand(cluster, namespace, "hostile")
    # Without capabilities a user makes folders only where the image lets them.
    sandbox.apply(user=user, workingDir="/tmp/work", workspaces={"mode": "Plain"}).wait_ready()
    got = attack(sandbox)
    assert got.keys() <= NO_ESCAPE_FROM_PLAIN.keys(), got
    sandbox.assert_unharmed()


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
def test_root_in_the_container_can_neither_end_nor_trace_nor_read_the_executor(
    cluster: Cluster, namespace: str, mode: str
) -> None:
    sandbox = ByHand(cluster, namespace, "beside").apply(workspaces={"mode": mode}).wait_ready()
    # The executor takes signals from its container until it serves, and no tool runs before that.
    sandbox.assert_unharmed()
    assert sandbox.run_in_container("id", "-u").stdout == "0\n"
    done = sandbox.run_in_container("python3", "-", text=AS_ROOT_BESIDE_THE_EXECUTOR)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    if mode == "Overlay":
        # From the container, whose parent user namespace is the node's: (first id inside, on the node, how many).
        read = sandbox.run_in_container("cat", "/proc/self/uid_map")
        assert read.returncode == 0, (read.stderr, sandbox.describe())
        first, on_the_node, count = map(int, read.stdout.split())
        assert (first, count) == (0, 65536)
        assert on_the_node >= 65536, "root there is somebody on the node"
    sandbox.assert_unharmed()

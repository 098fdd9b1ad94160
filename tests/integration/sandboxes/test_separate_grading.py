"""An agent's work is graded in a new workspace: real executors, both modes."""

import os
import random
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.attempt.grading import GradingLost, grade_artifacts
from agent_runtime.grading.grade import VerifierUnavailable, grade, require_preparable, require_startable
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.records import Verdict
from rollout_api.rollout_job import Attempts, Verifier
from rollout_api.tasks import Task
from tests.integration.sandboxes.conftest import FIRST, spec, template
from tests.support.ports import free_port

SETUP = [
    "mkdir data other && echo good > other/x && echo old > data/x",
    "mkdir -p backend/.venv/bin && touch backend/.venv/pyvenv.cfg",
    "printf '#!/bin/sh\\necho real\\n' > backend/.venv/bin/python && chmod +x backend/.venv/bin/python",
]
WORK_DIR = "/srv/agent/work"
FAKE = "printf '#!/bin/sh\\necho fake\\n' >"
WORK: dict[str, tuple[list[str], str]] = {
    "a folder that became a link": (
        ["rm -r data && ln -s other data"],
        "grep good other/x && grep good data/x && test -L data",
    ),
    "an environment behind a link": (
        ["mv backend b2 && ln -s b2 backend", f"{FAKE} b2/.venv/bin/python"],
        "backend/.venv/bin/python | grep real",
    ),
    "an environment behind a file": (["rm -r backend && touch backend"], "backend/.venv/bin/python | grep real"),
    "folders without permissions": (
        ["mkdir shut && echo 1 > shut/a && chmod 555 shut other", "rm data/x"],
        "grep 1 shut/a && test ! -e data/x",
    ),
    "what its owner cannot read": (
        ["mkdir -p shut/in && echo 1 > shut/in/a && echo 2 > b && chmod 000 shut/in/a shut/in shut b"],
        "stat -c %a shut b | grep -c '^0$' | grep 2 && chmod -R u+rwX shut b && grep 1 shut/in/a && grep 2 b",
    ),
    "names that are not text": (
        ["touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\""],
        "test $(ls | wc -c) -gt 4 && test -e $'\\xff'",
    ),
}


@pytest.fixture
def provider_of(tmp_path: Path) -> Callable[..., LocalProvider]:
    def make(mode: str, user: str | None = None) -> LocalProvider:
        return LocalProvider(tmp_path / "run", template(mode, **({"user": user} if user else {})), places=4)

    return make


async def graded(
    provider: LocalProvider,
    work: Sequence[str],
    *,
    setup: Sequence[str] = SETUP,
    user: str | None = None,
    verifier_user: str | None = None,
    as_root: str = "true",
    network: Sequence[str] = (),
    limit: int = 1,
    **verifier: Any,
) -> Verdict:
    """Return the verdict on a rollout whose agent ran those commands."""
    task = Task.model_validate({"name": "t", "prompt": "p", "verifier": {"user": verifier_user, **verifier}})
    prepared = spec(working_dir=WORK_DIR, setup=setup, user=user, network={"verifier": list(network) or "None"})
    agent = await provider.acquire(prepared, attempt="0-1", fence=FIRST, name="agent")
    for number, command in enumerate(work):
        done = await agent.run(command, key=f"1:{number}", deadline_seconds=60)
        assert done.ok, done
    assert (await agent.run(as_root, key="1:root", deadline_seconds=60, user="0")).ok
    archive = b"".join([piece async for piece in agent.tar(".", parts=["."])])
    await agent.release()

    async def artifacts() -> AsyncIterator[bytes]:
        for start in range(0, len(archive), 1 << 20):
            yield archive[start : start + (1 << 20)]

    return await grade_artifacts(
        task,
        Verifier(),
        provider,
        prepared,
        attempt="0-1",
        fence=FIRST,
        artifacts=artifacts,
        attempts=Attempts.model_validate({"limit": limit, "backoffSeconds": 0.1}),
        jitter=random.Random(),
    )


async def test_file_in_place_of_a_linked_folder_is_no_reason_not_to_grade(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "run", template("Overlay"), places=2)
    await provider.open()
    try:
        setup = ["mkdir logs; rm -rf /logs; ln -s $PWD/logs /logs"]
        verdict = await graded(
            provider,
            ["rm -r logs; touch logs"],
            setup=setup,
            kind="rewardFile",
            commands=["echo 1 > /logs/verifier/reward.txt"],
        )
    finally:
        await provider.close()
    assert verdict.reward == 0


@pytest.mark.parametrize(
    ("mode", "user"), [pytest.param("Overlay", None, marks=pytest.mark.full), ("Overlay", "1000:1000"), ("Plain", None)]
)
@pytest.mark.parametrize("work", WORK)
async def test_files_of_the_agent_are_graded_unchanged(
    provider_of: Callable[..., LocalProvider], mode: str, user: str | None, work: str
) -> None:
    commands, check = WORK[work]
    provider = provider_of(mode, user)
    await provider.open()
    try:
        verdict = await graded(provider, commands, user=user, commands=[f"bash -c {quoted(check)}"])
    finally:
        await provider.close()
    assert verdict.passed, verdict


async def test_work_beside_a_file_that_only_root_may_read_is_graded(provider_of: Callable[..., LocalProvider]) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    try:
        checks = ["grep new work && test ! -e secret && test ! -e hidden/a", 'test "$(stat -c %u work)" = 1000']
        root_only = "umask 077 && echo 1 > secret && mkdir hidden && echo 2 > hidden/a"
        verdict = await graded(provider, ["echo new > work"], user="1000:1000", as_root=root_only, commands=checks)
    finally:
        await provider.close()
    assert verdict.passed, verdict


REPLACES_REPORT = """
import os, time
if os.fork() == 0:
    os.setsid()
    for descriptor in range(3):
        os.close(descriptor)
    time.sleep(0.2)
    for replace in (lambda: os.rename("/verifier", "/other"), lambda: os.mkdir("/verifier")):
        try:
            replace()
        except OSError:
            pass
    forged = '<testsuites><testsuite><testcase classname="tests.test_zzz" name="test_adds"/></testsuite></testsuites>'
    while True:
        try:
            os.makedirs("/verifier/.rollout-verifier", exist_ok=True)
            open("/verifier/forged", "w").write(forged)
            os.rename("/verifier/forged", "/verifier/.rollout-verifier/0.xml")
        except OSError:
            pass
"""


@pytest.mark.parametrize(("verifier_user", "forgeable"), [(None, True), ("0", False)])
async def test_report_replaced_by_code_under_test_is_unreachable_or_forgeable(
    provider_of: Callable[..., LocalProvider], verifier_user: str | None, forgeable: bool
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    as_user = "" if verifier_user is None else "user=1000, "
    test = HIDDEN_TEST.replace("calc.py", f"{WORK_DIR}/calc.py").replace("capture", f"{as_user}capture")
    try:
        verdict = await graded(
            provider,
            [f"cat > calc.py <<'EOF'\n{REPLACES_REPORT}\nEOF"],
            setup=[],
            user="1000:1000",
            verifier_user=verifier_user,
            isolated=True,
            kind="pytest",
            commands=[f"{sys.executable} -m pytest -q tests; sleep 1"],
            files=[{"path": "tests/test_zzz.py", "content": test}],
            tests=["tests/test_zzz.py::test_adds"],
        )
    finally:
        await provider.close()
    assert verdict.forgeable is forgeable, verdict
    assert verdict.reward == (1 if forgeable else 0), verdict


async def test_another_user_than_the_agents_may_grade_with_pytest(provider_of: Callable[..., LocalProvider]) -> None:
    """It may lack the right to make a folder for the report in the working folder."""
    provider = provider_of("Overlay", None)
    await provider.open()
    try:
        verdict = await graded(
            provider,
            ["echo 'def add(a, b): return a + b' > calc.py"],
            setup=[],
            verifier_user="1000:1000",
            kind="pytest",
            # A linter names a file of the agent, which is no test therefore.
            commands=[f"{sys.executable} -m pytest -q test_a.py", f"{sys.executable} -B -c 'import calc' calc.py"],
            files=[{"path": "test_a.py", "content": "from calc import add\ndef test_a(): assert add(1, 2) == 3\n"}],
            tests=["test_a.py::test_a"],
        )
    finally:
        await provider.close()
    assert verdict.reward == 1, verdict


LOADED = [
    "conftest.py",
    "json.py",
    "pytest.py",
    "sitecustomize.py",
    "tests/__init__.py",
    "toml.py",
    "_pytest/__init__.py",
]


async def test_nothing_of_the_agent_is_loaded_by_an_isolated_verifier_whatever_is_carried(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    forge = "import os; print(1, file=open('/logs/verifier/reward.txt', 'w')); os._exit(0)"
    settings = "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini"
    try:
        verdict = await graded(
            provider,
            ["mkdir tests _pytest", *(f'echo "{forge}" > {name}' for name in LOADED), settings],
            setup=[],
            user="1000:1000",
            verifier_user="0",
            isolated=True,
            kind="rewardFile",
            artifacts=[".", *LOADED, "pytest.ini"],
            commands=[f"{sys.executable} -m pytest -q tests && echo 0.5 > /logs/verifier/reward.txt"],
            files=[
                {"path": "tests/test_a.py", "content": "import json, toml_free\ndef test_a(): pass\n"},
                {"path": "toml_free.py", "content": ""},
            ],
        )
    finally:
        await provider.close()
    assert (verdict.reward, verdict.forgeable) == (0.5, False), verdict


async def test_code_under_test_can_neither_read_nor_change_what_an_isolated_verifier_has(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups"
    try:
        verdict = await graded(
            provider,
            ["umask 077 && echo echo 42 > run.sh", "mv $(mktemp) empty"],
            setup=[],
            user="1000:1000",
            verifier_user="0",
            isolated=True,
            commands=[
                f"{as_user} sh {WORK_DIR}/run.sh > answer && cmp answer answers/right && {as_user} touch {WORK_DIR}/empty",
                f"! {as_user} cat /verifier/answers/right && ! {as_user} ls /verifier && ! {as_user} mv /verifier /v",
                f"cd answers && ! {as_user} cat right && ! {as_user} ls . && ! {as_user} ls ..",
            ],
            files=[{"path": "answers/right", "content": "42\n"}],
        )
    finally:
        await provider.close()
    assert (verdict.passed, verdict.forgeable) == (True, False), verdict


@pytest.mark.parametrize("isolated", [False, True])
async def test_a_verdict_is_forgeable_unless_the_verifier_is_isolated(
    provider_of: Callable[..., LocalProvider], isolated: bool
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    try:
        verdict = await graded(
            provider,
            ["touch solved"],
            setup=[],
            user="1000:1000",
            verifier_user="0",
            commands=[f"test -e {WORK_DIR}/solved"],
            isolated=isolated,
        )
    finally:
        await provider.close()
    assert (verdict.reward, verdict.forgeable) == (1, not isolated), verdict


@pytest.mark.parametrize("working_dir", ["/verifier", "/verifier/work", "/"])
async def test_a_working_directory_cannot_share_the_folder_of_an_isolated_verifier(
    provider_of: Callable[..., LocalProvider], working_dir: str
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    prepared = spec(user="1000:1000", working_dir=working_dir, files=[], setup=[])
    workspace = await provider.acquire(prepared, attempt="0-1", fence=FIRST, name="grading")
    task = Task.model_validate({"name": "t", "prompt": "x", "verifier": {"commands": ["true"], "isolated": True}})
    with pytest.raises(VerifierUnavailable, match=r"choose another sandbox\.workingDir"):
        await grade(task, Verifier(), workspace, key_turn=1)
    await provider.close()


async def test_an_image_in_which_folders_cannot_be_closed_is_no_fault_of_the_agent(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    workspace = await provider.acquire(spec(user="1000:1000"), attempt="0-1", fence=FIRST, name="grading")
    assert (await workspace.run("rm $(command -v chown)", key="0:image", deadline_seconds=30, user="root")).ok
    task = Task.model_validate(
        {"name": "t", "prompt": "x", "verifier": {"commands": ["true"], "user": "root", "isolated": True}}
    )
    assert await require_startable(task, workspace, key_turn=1)
    with pytest.raises(VerifierUnavailable, match="chown: "):
        await require_preparable(task, Verifier(), workspace, key_turn=1, is_apart=True)
    await provider.close()


async def test_an_isolated_verifier_needs_a_root_of_its_own(provider_of: Callable[..., LocalProvider]) -> None:
    provider = provider_of("Plain")
    await provider.open()
    workspace = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="grading")
    task = Task.model_validate({"name": "t", "prompt": "x", "verifier": {"commands": ["true"], "isolated": True}})
    with pytest.raises(VerifierUnavailable, match="cannot enter /verifier"):
        await require_preparable(task, Verifier(), workspace, key_turn=1)
    await provider.close()


# Lets user 1000 write the files that others create in the folder. The format and the numbers are those of Linux'
# posix_acl_xattr.h and posix_acl.h.
DEFAULT_ACL = f"""{sys.executable} - <<'END'
import os, struct
VERSION, NO_ID = 2, 2**32 - 1
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
READ, WRITE, EXECUTE = 4, 2, 1
ALL = READ | WRITE | EXECUTE
entries = [  # tag, permissions, id
    (USER_OBJ, ALL, NO_ID), (USER, ALL, 1000), (GROUP_OBJ, ALL, NO_ID), (MASK, ALL, NO_ID),
    (OTHER, READ | EXECUTE, NO_ID),
]
value = struct.pack("<I", VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
os.setxattr("/", "system.posix_acl_default", value)
END"""


async def test_a_default_acl_of_the_image_lets_nobody_into_the_folders_of_an_isolated_verifier(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups"
    workspace = await provider.acquire(spec(user="1000:1000"), attempt="0-1", fence=FIRST, name="grading")
    assert (await workspace.run(DEFAULT_ACL, key="0:image", deadline_seconds=30, user="root")).ok
    attack = f"! {as_user} touch $folder/x && ! {as_user} mv $folder /y"
    commands = [f"for folder in /logs/verifier /verifier; do {attack} || exit 1; done"]
    verifier = {"commands": commands, "user": "root", "isolated": True, "kind": "rewardFile"}
    task = Task.model_validate({"name": "t", "prompt": "x", "verifier": verifier})
    assert await require_startable(task, workspace, key_turn=1)
    verdict = await grade(task, Verifier(), workspace, key_turn=1, is_apart=True)
    await provider.close()
    assert ([command.exit_code for command in verdict.commands], verdict.forgeable) == ([0], False), verdict


WRITES_REWARD = "grep -qx solved answer.txt && echo 1 > /logs/verifier/reward.txt && touch /opt/hidden/cache"


@pytest.mark.parametrize("verifier_user", [None, "0", "1001"])
async def test_reward_file_is_graded_when_no_user_may_write_outside_the_working_directory(
    provider_of: Callable[..., LocalProvider], verifier_user: str | None
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    try:
        verdict = await graded(
            provider,
            ["echo solved > answer.txt"],
            setup=[],
            user="1000:1000",
            verifier_user=verifier_user,
            kind="rewardFile",
            commands=["sh /opt/hidden/test.sh"],
            files=[{"path": "/opt/hidden/test.sh", "content": WRITES_REWARD, "mode": "600"}],
        )
    finally:
        await provider.close()
    assert verdict.reward == 1, verdict


PRIVATE_REWARD = "file=$(mktemp) && echo 1 > $file && mv $file /logs/verifier/reward.txt"
PRIVATE_REPORT = f"umask 077 && {sys.executable} -m pytest -q -p no:cacheprovider /opt/hidden/test_a.py"


@pytest.mark.parametrize(
    ("kind", "verifier_user", "command"),
    [("rewardFile", "0", PRIVATE_REWARD), ("rewardFile", "1001", PRIVATE_REWARD), ("pytest", "0", PRIVATE_REPORT)],
)
async def test_files_that_only_the_verifiers_user_may_read_are_graded(
    provider_of: Callable[..., LocalProvider], kind: str, verifier_user: str, command: str
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    await provider.open()
    try:
        verdict = await graded(
            provider,
            [],
            setup=[],
            user="1000:1000",
            verifier_user=verifier_user,
            kind=kind,
            commands=[command],
            files=[{"path": "/opt/hidden/test_a.py", "content": "def test_a(): pass"}],
        )
    finally:
        await provider.close()
    assert verdict.reward == 1, verdict


def quoted(command: str) -> str:
    return "'" + command.replace("'", "'\\''") + "'"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, a workspace has a single user")
@pytest.mark.parametrize(("setup", "is_apart"), [("true", True), ("ln -s /var/tmp /logs", False)])
async def test_code_under_test_that_can_act_as_root_makes_a_verdict_forgeable(
    provider_of: Callable[..., LocalProvider], setup: str, is_apart: bool
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    workspace = await provider.acquire(spec(user="1000:1000"), attempt="0-1", fence=FIRST, name="grading")
    assert (await workspace.run(setup, key="0:image", deadline_seconds=30, user="root")).ok
    verifier = {"commands": ["true"], "user": "root", "isolated": True}
    task = Task.model_validate({"name": "t", "prompt": "x", "verifier": verifier})
    assert await require_startable(task, workspace, key_turn=1) is is_apart
    await provider.close()


AS_ROOT = f"""{sys.executable} -c "import os; os.setgid(1000); os.setuid(1000); \\
os.execv('/opt/as-root', ['sh', '-p', '-c', 'id -u'])" """


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, a workspace has a single user")
async def test_what_an_isolated_verifier_starts_gains_no_rights_by_setuid_programs(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    workspace = await provider.acquire(spec(user="1000:1000"), attempt="0-1", fence=FIRST, name="grading")
    install = "cp $(command -v bash) /opt/as-root && chmod 4755 /opt/as-root"
    assert (await workspace.run(install, key="0:image", deadline_seconds=30, user="root")).ok

    async def uid(key: str, *, bounded: bool) -> bytes:
        result = await workspace.run(AS_ROOT, key=key, deadline_seconds=30, user="root", bounded=bounded)
        assert result.ok, result
        return result.stdout.strip()

    uids = [
        await uid(f"1:{number}", bounded=bounded) for number, bounded in enumerate((False, True, False, True, True))
    ]
    assert uids == [b"0", b"1000", b"0", b"1000", b"1000"]
    verifier = {"commands": [f"test $({AS_ROOT}) = 1000"], "user": "root", "isolated": True}
    task = Task.model_validate({"name": "t", "prompt": "x", "verifier": verifier})
    assert await require_startable(task, workspace, key_turn=2)
    verdict = await grade(task, Verifier(), workspace, key_turn=3, is_apart=True)
    assert (verdict.reward, verdict.forgeable) == (1, False), verdict
    await provider.close()


async def test_a_judge_that_is_away_gives_no_reward(provider_of: Callable[..., LocalProvider]) -> None:
    provider = provider_of("Overlay")
    place = f"127.0.0.1:{free_port()}"
    asks = (
        "exec 3<>/dev/tcp/127.0.0.1/3128; "
        f"printf 'CONNECT {place} HTTP/1.1\\r\\n\\r\\n' >&3; head -n 1 <&3 | grep ' 200 '"
    )
    await provider.open()
    try:
        with pytest.raises(GradingLost, match=f"{place}.*cannot be reached") as lost:
            await graded(provider, [], network=[place], limit=2, commands=[f"bash -c {shlex.quote(asks)}"])
        assert lost.value.reason == "Unreachable"
        # A verdict that does not need the judge stands.
        assert (await graded(provider, [], network=[place], commands=["true"])).passed
        assert not (await graded(provider, [], network=[place], commands=["false"])).passed
    finally:
        await provider.close()


async def test_an_isolated_verifier_may_say_that_it_has_no_verdict_and_others_may_not(
    provider_of: Callable[..., LocalProvider],
) -> None:
    provider = provider_of("Overlay", "1000:1000")
    says = "echo the judge is overloaded > /logs/verifier/unavailable.txt"
    of_user: dict[str, Any] = {"setup": [], "user": "1000:1000", "verifier_user": "0"}
    await provider.open()
    try:
        for kind in ("commands", "rewardFile"):
            with pytest.raises(GradingLost, match=r"unavailable\.txt: the judge is overloaded"):
                await graded(provider, [], **of_user, isolated=True, kind=kind, commands=[says, "false"])
        as_user = f"setpriv --reuid 1000 --regid 1000 --clear-groups sh -c '{says}'"
        assert not (await graded(provider, [], **of_user, isolated=True, commands=[as_user])).passed
        forged = await graded(provider, [], **of_user, kind="rewardFile", commands=[says])
    finally:
        await provider.close()
    assert (forged.reward, forged.forgeable) == (0, True)
    assert "the judge is overloaded; this does not count" in forged.message


async def test_thousands_of_deletions_and_hidden_files_are_graded(provider_of: Callable[..., LocalProvider]) -> None:
    hidden = [{"path": f"tests/a/b/c/f{number}", "content": "x"} for number in range(500)]
    outside = [{"path": f"/opt/hidden/{number}/f", "content": "x"} for number in range(500)]
    provider = provider_of("Overlay")
    await provider.open()
    try:
        verdict = await graded(
            provider,
            ["rm many/*"],
            setup=["mkdir many && cd many && touch keep && seq 5000 | xargs touch"],
            files=[*hidden, *outside],
            commands=["test -d many && test ! -e many/keep && grep x tests/a/b/c/f499 && grep x /opt/hidden/499/f"],
        )
    finally:
        await provider.close()
    assert verdict.passed, verdict


OUTCOMES_PATCHED = """
import _pytest.runner as runner

real = runner.CallInfo.from_call.__func__

def from_call(cls, func, when, reraise=None):
    return real(cls, func if when == "collect" else lambda: None, when, reraise)

runner.CallInfo.from_call = classmethod(from_call)
def test_nothing(): pass
"""
HIDDEN_TEST = """
import subprocess, sys

def test_adds():
    assert subprocess.run([sys.executable, "calc.py", "1", "2"], capture_output=True).stdout == b"3\\n"
"""
PLANTED = [
    "tests/test_aaa.py",
    "tests/aaa_test.py",
    "tests/deep/test_aaa.py",
    "tests/test_prepared.py",
    "tests/check_aaa.py",
    "tests/__init__.py",
]


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_test_that_the_agent_wrote_does_not_run_in_the_verifier(
    provider_of: Callable[..., LocalProvider], planted: str
) -> None:
    provider = provider_of("Overlay")
    await provider.open()
    try:
        verdict = await graded(
            provider,
            [f"mkdir -p tests/deep && cat > {planted} <<'EOF'\n{OUTCOMES_PATCHED}\nEOF"],
            setup=[
                "mkdir tests && echo 'def test_prepared(): pass' > tests/test_prepared.py",
                "printf '[pytest]\\npython_files = test_*.py *_test.py\\n  check_*.py\\n' > pytest.ini",
            ],
            kind="pytest",
            commands=[f"{sys.executable} -m pytest -q tests"],
            files=[{"path": "tests/test_zzz.py", "content": HIDDEN_TEST}],
        )
    finally:
        await provider.close()
    assert (verdict.reward, [test.passed for test in verdict.tests]) == (0, [False]), verdict
    assert any(planted in line for line in verdict.dropped), verdict

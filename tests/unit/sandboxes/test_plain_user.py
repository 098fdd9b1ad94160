import os
import pwd

import pytest

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.local.provider import plain_uid


def test_a_user_that_plain_mode_cannot_become_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert plain_uid(None) == 1234
    assert plain_uid("1234:55") == 1234
    with pytest.raises(SandboxFailure, match=r"sandbox\.user '77'.*run as root"):
        plain_uid("77")
    with pytest.raises(SandboxFailure, match="not a user of this machine"):
        plain_uid("nobody-knows-me")


def test_root_runs_plain_commands_as_nobody_user_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert plain_uid(None) == pwd.getpwnam("nobody").pw_uid
    assert plain_uid("77") == 77

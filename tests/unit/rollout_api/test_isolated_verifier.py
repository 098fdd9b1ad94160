"""What an isolated verifier may name."""

from typing import Any

import pytest

from rollout_api.tasks import TaskVerifier


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"files": [{"path": "/workspace/tests/test_a.py", "content": ""}]},
            "'/workspace/tests/test_a.py' is absolute",
        ),
        ({"files": [{"path": "../x", "content": ""}]}, "leaves the working directory"),
        ({"kind": "junit", "report": "/tmp/report.xml"}, "'/tmp/report.xml' is absolute"),
        ({"kind": "junit", "report": "../tmp/report.xml"}, "'..' is not allowed"),
        ({"artifacts": ["/verifier"]}, "cannot be an artifact"),
        ({"artifacts": ["out", "/verifier/out"]}, "cannot be an artifact"),
    ],
)
def test_paths_outside_the_verifiers_folder_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskVerifier.model_validate({"commands": ["true"], "isolated": True, **fields})


def test_other_verifiers_may_use_absolute_paths() -> None:
    files = [{"path": "/workspace/tests/test_a.py", "content": ""}]
    fields = {"commands": ["true"], "kind": "junit", "report": "/tmp/r.xml", "files": files, "artifacts": ["/verifier"]}
    assert not TaskVerifier.model_validate(fields).isolated

"""The running server against its own OpenAPI document: every reply to arbitrary requests is documented."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agent_runtime.executor.routes import application as routes
from agent_runtime.sandboxes.base import Fence
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from tests.support.full import MODES_ONCE, examples

DOCUMENT = Path(routes.__file__).parents[1] / "openapi.json"
ALLOWED_SERVER_ERRORS = {"NoPlace", "WorkspaceFailed"}
# With all examples, every field is absent, null, wrong and at its bounds once.
EXAMPLES = examples(25)
EPOCH = 7
MOST_PARKINGS = 9
RESTORER = "restorer"
HOLD = {"epoch": EPOCH, "holder": "fuzzer"}
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def harmless(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with harmless commands, paths and waits, and with names of existing objects."""
    components = document["components"]
    components["parameters"]["waitSeconds"]["schema"] = {"type": "number", "minimum": 0, "maximum": 0.05}
    components["parameters"]["path"]["schema"] = {"enum": ["/fuzz/f/a", "/fuzz/f", "/fuzz/f/a/b", "fuzz/f/c"]}
    components["parameters"]["workspace"]["schema"] = {"enum": ["fuzzed", "none"]}
    components["parameters"]["process"]["schema"] = {"enum": ["0-cat", "0-true", "none"]}
    components["parameters"]["attempt"]["schema"] = {"enum": ["fuzz", "other"]}
    components["schemas"]["WorkspaceOrder"]["properties"]["id"] = {"enum": ["fuzzed", "second"]}
    components["schemas"]["WorkspaceOrder"]["properties"]["parent"] = {"enum": ["fuzzed", "none", None]}
    # The hold is the test's own, or else every call would be refused for the same reason.
    for name, value in (("attemptHeader", "fuzz"), ("fence", f"{HOLD['epoch']}:{HOLD['holder']}")):
        components["parameters"][name]["schema"] = {"const": value}
    components["schemas"]["Hold"]["properties"]["epoch"]["maximum"] = EPOCH - 1
    watermark = document["paths"]["/v1/attempts/{attempt}/watermark"]["put"]["requestBody"]["content"]
    watermark["application/json"]["schema"]["properties"]["turn"]["maximum"] = 0
    idle = document["paths"]["/v1/idle"]["put"]["requestBody"]["content"]
    idle["application/json"]["schema"]["properties"]["seconds"]["minimum"] = 600
    still = document["paths"]["/v1/still"]["put"]["requestBody"]["content"]
    still["application/json"]["schema"]["properties"]["parking"]["maximum"] = MOST_PARKINGS
    still["application/json"]["schema"]["properties"]["restorer"] = {"enum": [RESTORER]}
    # The last, because afterwards no workspace can be created.
    document["paths"]["/v1/drain"] = document["paths"].pop("/v1/drain")
    for path in document["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                content = operation.get("requestBody", {}).get("content", {})
                if "application/x-tar" in content:
                    # The fuzzer can write bytes of this media type only.
                    content["application/octet-stream"] = content.pop("application/x-tar")
                operation["parameters"] = [
                    p for p in operation.get("parameters", []) if p.get("$ref") != "#/components/parameters/key"
                ]
    return document


def valid(result: Any) -> Any:
    """Return the operation of a result. Raises if the document has an error."""
    return result.ok()


SCHEMA = schemathesis.openapi.from_dict(harmless(json.loads(DOCUMENT.read_text())))
OPERATIONS = {operation.label: operation for operation in map(valid, SCHEMA.get_all_operations())}
_keys = itertools.count()


@pytest.fixture(scope="module", params=MODES_ONCE)
def fuzzed(request: pytest.FixtureRequest) -> Any:
    """An executor on TCP with a fenced attempt, a workspace, a folder, an ended process and one that reads its input."""
    executor_process = request.getfixturevalue("executor_process")
    executor = executor_process(request.param, listen="tcp:127.0.0.1:0", places=2)
    yield executor
    log = executor.log.read_text()
    executor.end()
    assert '"event": "defect"' not in log, log


def prepare(base: str, headers: dict[str, str]) -> None:
    """Make again what earlier calls may have deleted."""

    def call(method: str, path: str, key: str | None = None, **body: Any) -> int:
        key = key or f"0:prepare{next(_keys)}"
        reply = requests.request(method, base + path, headers={**headers, "Idempotency-Key": key}, timeout=30, **body)
        assert reply.status_code in (200, 404, 409, 503), reply.text
        return reply.status_code

    # It may be still for a later parking, and for a restorer.
    for number, restorer in itertools.product((1, MOST_PARKINGS), ({}, {"restorer": RESTORER})):
        if call("PUT", "/v1/still", json={"still": False, "parking": number, **restorer}) == 200:
            break
    call("PUT", "/v1/attempts/fuzz/fence", json=HOLD)
    call("DELETE", "/v1/attempts/fuzz")
    call("PUT", "/v1/attempts/fuzz/fence", json=HOLD)
    call("POST", "/v1/workspaces", json={"id": "fuzzed"})
    call("DELETE", "/v1/workspaces/fuzzed/files?path=/fuzz")
    call("PUT", "/v1/workspaces/fuzzed/files?path=/fuzz/f/a", data=b"content")
    asyncio.run(start_commands(base, headers["Authorization"].removeprefix("Bearer ")))


async def start_commands(base: str, token: str) -> None:
    """Start a command that reads its input, and one that ends."""
    client = ExecutorClient(f"tcp:{base.removeprefix('http://')}", token)
    hold = Hold("fuzz", Fence(EPOCH, "fuzzer"))
    how: dict[str, Any] = {"cwd": None, "user": None, "env": {}, "stdin": b"", "head_bytes": 100, "tail_bytes": 100}
    for command in ("cat", "true"):
        await client.start(hold, "fuzzed", f"0:{command}", [command], deadline_seconds=None, **how)
    await client.close()


def test_document_lists_exactly_the_routes() -> None:
    document = json.loads(DOCUMENT.read_text())
    described = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
        if method != "parameters"
    }
    names = {"attempts": "{attempt}", "workspaces": "{workspace}", "processes": "{process}"}
    served = {("GET", "/healthz"), ("GET", "/v1/health")}
    for method, pattern in routes.ROUTES:
        parts = pattern.split("/")
        filled = [names[parts[n - 1]] if part == "*" else part for n, part in enumerate(parts)]
        served.add((method, "/v1/" + "/".join(filled)))
    assert served == described


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_reply_to_arbitrary_requests_is_documented(fuzzed: Any, label: str) -> None:
    base = f"http://{fuzzed.address.removeprefix('tcp:')}"
    headers = {
        "Authorization": f"Bearer {fuzzed.token}",
        "Rollout-Attempt": "fuzz",
        "Rollout-Fence": f"{HOLD['epoch']}:{HOLD['holder']}",
    }
    prepare(base, headers)

    @given(case=OPERATIONS[label].as_strategy())
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def fuzz(case: Any) -> None:
        response = case.call(base_url=base, headers={**headers, "Idempotency-Key": f"1:fuzz{next(_keys)}"}, timeout=30)
        if response.status_code >= 500:
            assert response.json()["error"]["code"] in ALLOWED_SERVER_ERRORS, response.text
        case.validate_response(response, checks=CHECKS, excluded_checks=[not_a_server_error])

    fuzz()

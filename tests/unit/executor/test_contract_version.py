"""The version of the executor's contract is raised with the contract."""

import hashlib
import json
from pathlib import Path
from typing import Any

from agent_runtime import executor
from agent_runtime.executor.commands.streams import ENDED, ORDER

DIGEST = "866eda70ce502419d599d648f7e9367cd290c7d9297395757a505714e63aa41e"


def without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_prose(inner) for key, inner in value.items() if key not in ("description", "info")}
    return [without_prose(inner) for inner in value] if isinstance(value, list) else value


def test_another_contract_has_another_version() -> None:
    """If it fails, set CONTRACT_VERSION and `info.version` of openapi.json to the next number, and write the digest here."""
    document = json.loads((Path(executor.__file__).parent / "openapi.json").read_text())
    contract = json.dumps([without_prose(document), ORDER.format, ENDED.format], sort_keys=True)
    assert document["info"]["version"] == executor.CONTRACT_VERSION
    assert executor.CONTRACT_VERSION == "2"
    assert hashlib.sha256(contract.encode()).hexdigest() == DIGEST

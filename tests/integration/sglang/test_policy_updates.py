"""Policy updates of SGLang itself and of its stand-in: the operator, the gateway, and a runner's calls in progress, as
for vLLM.
"""

import asyncio
import json
from pathlib import Path

from tests.integration.sglang.conftest import SglangServer
from tests.integration.vllm.operated import Operated
from tests.integration.vllm.test_policy_updates import (  # noqa: F401
    first_tokens,
    test_client_that_leaves_the_gateway_ends_its_request,
    test_gateway_serves_the_digest_of_the_loaded_weights,
    test_runner_that_missed_an_update_records_the_versions_that_the_server_reports,
    test_update_loses_no_call_and_records_the_version_of_each_token,
    test_version_0_is_served_again_after_an_update,
    uri,
)


async def test_failed_load_returns_to_version_0(server: SglangServer, served: Operated, tmp_path: Path) -> None:
    zero = await first_tokens(served)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(
        (Path(server.checkpoint(0)) / "config.json").read_text() if server.real else "[]"
    )
    served.patch(1, uri(str(empty)))
    await served.until_failed(1)
    assert served.status.policy.current == 0
    assert await first_tokens(served) == zero
    assert json.loads((tmp_path / "story.json").read_text())["reason"] == "LoadFailed"
    served.patch(2, uri(server.checkpoint(2)))
    await served.until(2)
    assert await first_tokens(served) != zero


async def test_malformed_weights_are_found_before_the_load_that_would_end_the_server(
    server: SglangServer, served: Operated, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no weights")
    served.patch(1, uri(str(broken)))
    async with asyncio.timeout(120):
        while "is no safetensors file" not in (tmp_path / "story.json").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert served.status.policy.step is None or served.status.policy.step.value == "Fetching"
    zero = await first_tokens(served)
    served.patch(2, uri(server.checkpoint(2)))
    await served.until(2)
    assert await first_tokens(served) != zero

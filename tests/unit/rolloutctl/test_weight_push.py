"""`WeightPushHook` is called by a gateway, and each `WeightPush` by vLLM's trainer engine."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import pytest

from rolloutctl.weight_push import WeightPush, WeightPushCancelled, WeightPushHook

UPDATE = {"names": ["w", "v"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
INIT = {"master_address": "10.0.0.2", "master_port": 29500, "rank_offset": 1, "world_size": 7, "packed": True}


@dataclass
class Weight:
    name: str
    dtype: str
    shape: tuple[int, ...]


METADATA = [Weight("w", "torch.bfloat16", (2, 3)), Weight("v", "torch.float32", (4,))]


class Operator:
    """Calls the hook, as a gateway does for the operator."""

    def __init__(self, hook: WeightPushHook, pool: ThreadPoolExecutor) -> None:
        self._hook, self._pool = hook, pool
        self.pushes = iter(hook)

    def ask(self, transfer: str, version: int = 8) -> Future[tuple[int, Any]]:
        servers = [{"name": f"qwen-{number}", "uid": "u", "url": "http://x", "worldSize": 2} for number in range(3)]
        question = {
            "transfer": transfer, "modelServer": "qwen", "update": 1, "policy": {"version": version}, "servers": servers,
        }  # fmt: skip
        return self._pool.submit(self.post, json.dumps(question))

    def post(self, body: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self._hook.port)
        connection.request("POST", "/hook", body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture
def operator() -> Iterator[Operator]:
    with ThreadPoolExecutor() as pool, WeightPushHook(port=0, host="127.0.0.1") as hook:
        yield Operator(hook, pool)


def test_hook_answers_what_the_trainer_engine_sends_with_a_rank_for_each_server(operator: Operator) -> None:
    asked = operator.ask("a")
    push = next(operator.pushes)
    assert (push.version, push.world_size) == (8, 7)
    client = push.client(METADATA)
    client.init_weight_transfer_engine(INIT)
    ranks = {"qwen-0": 1, "qwen-1": 3, "qwen-2": 5}
    servers = {name: {"initInfo": {**INIT, "rank_offset": rank}} for name, rank in ranks.items()}
    assert asked.result() == (200, {"updates": [UPDATE], "servers": servers})
    client.start_weight_update()
    client.update_weights(UPDATE)
    client.finish_weight_update()
    # The first gateway may fail before it has passed the answer on.
    assert operator.ask("a").result() == asked.result()


def test_later_push_cancels_the_earlier_one(operator: Operator) -> None:
    first = operator.ask("a")
    earlier = next(operator.pushes)
    client = earlier.client(METADATA)
    second = operator.ask("b", 7)
    assert first.result()[0] == 410
    with pytest.raises(WeightPushCancelled):
        client.init_weight_transfer_engine(INIT)
    with pytest.raises(WeightPushCancelled):
        earlier.client(METADATA)
    push = next(operator.pushes)
    assert push.version == 7
    push.refuse("version 7 is deleted")
    assert second.result() == (409, {"error": "version 7 is deleted"})


def test_cancelled_push_ends_its_block_and_an_error_of_the_trainer_refuses_the_push(operator: Operator) -> None:
    operator.ask("a")
    with next(operator.pushes) as earlier:
        second = operator.ask("b", 7)
        while earlier._answer is None:
            time.sleep(0.01)
        earlier.client(METADATA).init_weight_transfer_engine(INIT)
        pytest.fail("the cancelled push was sent")
    push = next(operator.pushes)
    assert push.version == 7
    with pytest.raises(LookupError), push:
        raise LookupError("no such module")
    assert second.result() == (409, {"error": "LookupError: no such module"})


def test_engine_that_waited_in_vain_for_a_server_does_not_end_the_trainer(operator: Operator) -> None:
    asked = operator.ask("a")
    with next(operator.pushes) as earlier:
        earlier.client(METADATA).init_weight_transfer_engine(INIT)
        assert asked.result()[0] == 200
        operator.ask("b", 7)
        push = next(operator.pushes)
        raise OSError("1/2 clients joined")
    assert push.version == 7


def test_push_is_refused_when_its_group_has_another_size(operator: Operator) -> None:
    asked = operator.ask("a")
    push = next(operator.pushes)
    with pytest.raises(ValueError, match="world_size is 4; this push needs 7"):
        push.client(METADATA).init_weight_transfer_engine(INIT | {"world_size": 4})
    assert asked.result() == (409, {"error": "world_size is 4; this push needs 7"})


def test_push_is_refused_when_the_weights_are_not_described(operator: Operator) -> None:
    asked = operator.ask("a")
    with pytest.raises(ValueError, match=r"give it push.client\(metadata\)"):
        next(operator.pushes).init_weight_transfer_engine(INIT)
    assert asked.result()[0] == 409


def test_engine_that_sends_other_weights_is_told(operator: Operator) -> None:
    asked = operator.ask("a")
    client: WeightPush = next(operator.pushes).client(METADATA)
    client.init_weight_transfer_engine(INIT)
    asked.result()
    with pytest.raises(ValueError, match="not those of the metadata"):
        client.update_weights(UPDATE | {"names": ["w", "u"]})


@pytest.mark.parametrize("body", ["{", "[]", "{}", '{"transfer": "a", "policy": {}, "servers": []}'])
def test_other_requests_are_answered_400(operator: Operator, body: str) -> None:
    assert operator.post(body)[0] == 400


def test_request_that_is_too_large_is_refused_before_it_arrives(operator: Operator) -> None:
    connection = HTTPConnection("127.0.0.1", operator._hook.port)
    connection.putrequest("POST", "/hook")
    connection.putheader("Content-Length", str(1 << 21))
    connection.endheaders()
    assert connection.getresponse().status == 400

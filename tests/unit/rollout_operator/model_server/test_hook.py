"""What is kept of a trainer's hook's answer."""

import json
import sys
from typing import Any

import pytest

from rollout_api.inference.vllm import VLLM
from rollout_operator.model_server.hook import HookProblem, Transfer, read_hook_answer

assert VLLM.updates.transfer is not None
REQUESTS = VLLM.updates.transfer


def read(answer: dict[str, Any], *names: str, most: int = 2**20) -> dict[str, Transfer]:
    return read_hook_answer(answer, REQUESTS, names, most)[0]


def parsed(transfer: Transfer) -> tuple[Any, list[Any]]:
    return transfer.init and json.loads(transfer.init), [json.loads(update) for update in transfer.updates]


def test_fields_of_a_server_replace_the_common_ones() -> None:
    answer = {
        "initInfo": {"rank": 0},
        "updates": [{"names": ["a"]}, {"names": ["é"]}],
        "servers": {"s-1": {"initInfo": {"rank": 1}}, "s-2": {"updates": [], "initInfo": None}, "other": {}},
    }
    found = read(answer, "s-0", "s-1", "s-2")
    updates = [{"update_info": {"names": ["a"]}}, {"update_info": {"names": ["é"]}}]
    assert {name: parsed(transfer) for name, transfer in found.items()} == {
        "s-0": ({"init_info": {"rank": 0}}, updates),
        "s-1": ({"init_info": {"rank": 1}}, updates),
        "s-2": (None, []),
    }
    assert found["s-0"].updates is found["s-1"].updates, "servers share what they have in common"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, "expected `updates`"),
        ({"updates": []}, "expected `updates`"),
        ({"updates": {}}, "`updates` has type dict"),
        ({"updates": [{}, 1, 2]}, "an entry of `updates` has type int"),
        ({"updates": [{}, 0]}, "an entry of `updates` has type int"),
        ({"updates": [{}], "initInfo": []}, "`initInfo` has type list"),
        ({"updates": [{}], "servers": []}, "`servers` has type list"),
        ({"updates": [{}], "servers": {"s": None}}, "an entry of `servers` has type NoneType"),
        ({"updates": [{}], "servers": {"s": {"updates": [[]]}}}, "an entry of `updates` has type list"),
    ],
)
def test_answer_of_another_form_is_refused(answer: dict[str, Any], words: str) -> None:
    with pytest.raises(HookProblem, match=words):
        read(answer, "s")


def test_all_requests_fit_into_the_bytes_of_the_answer() -> None:
    names = [f"model.layers.{number // 256}.mlp.experts.{number % 256}.w1.weight" for number in range(2000)]
    shapes, types = [[4096, 1536]] * 2000, ["bfloat16"] * 2000
    answer = {"updates": [{"names": names, "dtype_names": types, "shapes": shapes}]}
    most = 2 * len(json.dumps(answer))
    found, size = read_hook_answer(answer, REQUESTS, ["s-0", "s-1"], most)
    assert size < most / 2 + 1000
    assert size >= sum(map(sys.getsizeof, found["s-0"].updates))
    tiny: dict[str, Any] = {"updates": [{}] * 100_000}
    with pytest.raises(HookProblem, match="send fewer and larger `updates`"):
        read(tiny, "s", most=2 * len(json.dumps(tiny)))

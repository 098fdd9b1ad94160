"""Both trainers of the real verl get our rollouts in the form of their own: three steps each, with new weights each.

One process with verl's Python runs all of it (play.py) with a server that records its calls. These tests check the
results.
"""

import json
import os
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEPS = (1, 2, 3)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verl")
    made = subprocess.run([ROOT / "hack/verl-environment"], check=True, stdout=subprocess.PIPE, text=True)
    search = os.pathsep.join(map(str, (ROOT, ROOT / "operator", HERE)))
    with (folder / "log").open("wb") as output:
        playing = subprocess.run(
            [made.stdout.strip(), HERE / "play.py", folder],
            check=False,
            env=os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    log = (folder / "log").read_text()
    assert playing.returncode == 0, log[-4000:]
    found: dict[str, Any] = json.loads((folder / "played.json").read_text())
    seals = [json.loads(path.read_text())["result"] for path in folder.glob("rollouts/*/seals/**/*.json")]
    lost = [f"{seal['task']}: {seal['reason']}: {seal['message']}" for seal in seals if seal["outcome"] != "Completed"]
    found["losses"] = "\n".join([*lost, *(line for line in log.splitlines() if "ended with an error" in line)])
    return found


def legacy_rows(played: dict[str, Any]) -> list[tuple[int, Row]]:
    return [(step, row) for step, batch in zip(STEPS, played["legacy"], strict=True) for row in batch["rows"]]


def v1_rows(played: dict[str, Any]) -> list[tuple[int, Row]]:
    return [(step, row) for step, batch in zip(STEPS, played["v1"], strict=True) for row in batch["rows"]]


def runs_of_sampled(row: Row) -> list[tuple[list[int], list[int], list[float]]]:
    """Return, for each run of mask 1, the tokens before it, the run, and its logprobs."""
    runs, at = [], 0
    for bit, group in groupby(row["mask"]):
        length = len(list(group))
        if bit:
            before = [*row["prompt"], *row["response"][:at]]
            runs.append((before, row["response"][at : at + length], row["logprobs"][at : at + length]))
        at += length
    return runs


def answers_to(played: dict[str, Any]) -> dict[tuple[int, ...], list[tuple[list[int], list[float]]]]:
    """Return ids and logprobs that the server sampled, by prompt. The pieces of an answer that a weight update cut are
    joined.
    """
    seen: dict[tuple[int, ...], list[tuple[list[int], list[float]]]] = {}
    for call in played["seen"]:
        seen.setdefault(tuple(call["prompt"]), []).append(
            (call["ids"], [logprob_of(call["version"])] * len(call["ids"]))
        )
    joined = [
        (prompt, (ids + rest, logprobs + more))
        for prompt, answers in seen.items()
        for ids, logprobs in answers
        for rest, more in seen.get((*prompt, *ids), [])
    ]
    for prompt, answer in joined:
        seen[prompt].append(answer)
    return seen


def logprob_of(version: int) -> float:
    """Return the log probability by the rule of fake_server.py, which shows which weights sampled a token."""
    return -0.25 * (version + 1)


def test_trainer_trains_exactly_the_sampled_tokens_in_their_context(played: dict[str, Any]) -> None:
    seen = answers_to(played)
    rows = [row for _, row in legacy_rows(played) + v1_rows(played) if not row.get("lost")]
    for row in rows:
        runs = runs_of_sampled(row)
        assert runs
        for before, ids, logprobs in runs:
            assert (ids, logprobs) in seen[tuple(before)], row["task"]
        assert all(logprob == 0 for bit, logprob in zip(row["mask"], row["logprobs"], strict=True) if not bit)


def test_routed_experts_are_those_of_each_token_of_prompt_and_response(played: dict[str, Any]) -> None:
    for _, row in legacy_rows(played) + v1_rows(played):
        ids = [*row["prompt"], *row["response"]]
        # By the rule of fake_server.py. The last token was sampled and not processed; a lost row has none.
        known = [] if row.get("lost") else ids[:-1]
        expected = [[token % 200, position % 200] for position, token in enumerate(known)]
        assert row["experts"] == expected + [[0, 0]] * (len(ids) - len(known)), row["task"]


def test_each_step_is_trained_with_the_versions_of_its_own_weights(played: dict[str, Any]) -> None:
    for step, row in legacy_rows(played):
        assert row["lost"] or row["versions"] == [step, step]
    for step, row in v1_rows(played):
        tag = row["tag"]
        assert tag["global_steps"] == step
        if step < STEPS[-1]:
            assert (tag["min_global_steps"], tag["max_global_steps"]) == (step, step)


def test_an_answer_that_a_weight_update_cut_has_both_versions_and_is_still_trained(played: dict[str, Any]) -> None:
    tags = [row["tag"] for step, row in v1_rows(played) if row["task"] == "cut"]

    assert {"min": 3, "max": 4} in [{"min": tag["min_global_steps"], "max": tag["max_global_steps"]} for tag in tags]


def test_the_legacy_trainer_gets_its_own_rows_in_its_own_order(played: dict[str, Any]) -> None:
    word_ids = played["texts"]["ids"]
    for _, row in legacy_rows(played):
        if not row["lost"]:
            word = word_ids[played["texts"]["words"][row["task"]]]
            text = row["prompt"] + row["response"]
            assert any(text[i : i + len(word)] == word for i in range(len(text)))
        assert row["masked_padding"] == 0
        assert row["positions"]
        assert len(row["response"]) == len(row["mask"])


def test_reward_belongs_to_the_rollout_of_its_tokens(played: dict[str, Any]) -> None:
    wrong = played["texts"]["wrong"]
    for _, row in legacy_rows(played) + v1_rows(played):
        if row.get("lost") or row["task"] == "sum":
            continue
        if row.get("branch", 0) == 0 and row.get("branches", 1) == 1:
            sampled = [token for _, ids, _ in runs_of_sampled(row) for token in ids]
            wrote_wrong = any(sampled[i : i + len(wrong)] == wrong for i in range(len(sampled)))
            assert row["score"] == (0.0 if wrote_wrong else 1.0), row["task"]
        if row["score"]:
            assert row["score_at"] == len(row["response"]) - 1


def test_member_lost_to_infrastructure_gives_no_sample(played: dict[str, Any]) -> None:
    for batch in played["legacy"]:
        by_task = {task: list(rows) for task, rows in groupby(batch["rows"], lambda row: row["task"])}
        lost = [row for row in by_task["flaky"] if row["lost"]]
        kept = [row for row in by_task["flaky"] if not row["lost"]]
        assert (len(lost), len(kept)) == (1, 1)
        assert lost[0]["score"] == kept[0]["score"]
        assert sum(lost[0]["mask"]) == 0
        known = [row["score"] for row in batch["rows"] if row["task"] != "dead"]
        assert all(row["lost"] and row["score"] == pytest.approx(sum(known) / len(known)) for row in by_task["dead"])
        assert all(row["advantage"] == 0 for row in by_task["dead"] + by_task["flaky"])
        assert batch["timing"]["agent_loop/lost_rollouts"] == 3
    for batch in played["v1"]:
        members = [row["member"] for row in batch["rows"] if row["task"] == "flaky"]
        assert len(members) == 1
        assert not [row for row in batch["rows"] if row["task"] == "dead"]


def test_prompt_in_transfer_queue_is_finished_if_trainable_else_failed(played: dict[str, Any]) -> None:
    for batch in played["v1"]:
        unfinished = {task: status for task, status in batch["statuses"].items() if status != "finished"}
        assert unfinished == {"dead": "failure"}, played["losses"]


def test_verl_continues_while_its_batch_is_generated(played: dict[str, Any]) -> None:
    """No model answered before `generate_sequences` returned. A call that waited for the model would have returned
    results.
    """
    for batch in [*played["v1"], played["validation"]]:
        assert batch["on_return"].keys() == batch["statuses"].keys()
        assert not {"finished", "failure"} & set(batch["on_return"].values()), batch["on_return"]


def test_a_row_of_v1_is_a_group_of_as_many_members_as_it_asks_for(played: dict[str, Any]) -> None:
    for batch in played["v1"]:
        assert {row["member"] for row in batch["rows"] if row["task"] == "plain"} == {0, 1, 2}
        assert {row["member"] for row in batch["rows"] if row["task"] == "looked-up"} == {0, 1}


def test_forked_rollout_gives_v1_all_branches_and_the_legacy_trainer_the_last(played: dict[str, Any]) -> None:
    for batch in played["v1"]:
        forked = [row for row in batch["rows"] if row["task"] == "forgetful"]
        assert sorted((row["member"], row["branch"]) for row in forked) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        for member in (0, 1):
            assert len({row["score"] for row in forked if row["member"] == member}) == 1
    for batch in played["legacy"]:
        assert [row["branches"] for row in batch["rows"] if row["task"] == "forgetful"] == [2, 2]
        assert batch["timing"]["agent_loop/forked_rollouts"] == 2


def test_verls_advantages_reach_every_branch_of_the_right_rollouts(played: dict[str, Any]) -> None:
    for batch in played["v1"]:
        for task in ("looked-up", "forgetful"):
            rows = [row for row in batch["rows"] if row["task"] == task]
            assert {row["score"] for row in rows} == {0.0, 1.0}
            assert all((row["advantage"] > 0) == (row["score"] == 1.0) and row["advantage"] for row in rows)


def test_samples_in_transfer_queue_have_the_fields_and_tags_that_v1_trains_with(played: dict[str, Any]) -> None:
    needed = {
        *("prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "input_ids"),
        *("position_ids", "multi_modal_inputs", "num_turns", "metrics", "extra_fields"),
        *("uid", "raw_prompt", "data_source", "reward_model", "global_steps"),
    }
    for batch in played["v1"]:
        assert needed <= set(batch["fields"])
    for _, row in v1_rows(played):
        assert row["loss_mask"] == row["mask"]
        assert row["input_ids"] == row["prompt"] + row["response"]
        assert row["position_ids"] == list(range(len(row["input_ids"])))
        tag = row["tag"]
        assert (tag["status"], tag["prompt_len"], tag["response_len"]) == (
            "success",
            len(row["prompt"]),
            len(row["response"]),
        )
        assert tag["seq_len"] == len(row["input_ids"])
        assert row["num_turns"] == 2 * {"looked-up": 3, "sum": 1}.get(row["task"], 2)


def test_without_a_verifier_the_reward_is_that_of_verls_own_reward_function(played: dict[str, Any]) -> None:
    rows = played["graded_by_verl"]["rows"]
    assert sorted(row["score"] for row in rows if row["task"] == "sum") == [0.0, 1.0]
    lost, kept = sorted((row for row in rows if row["task"] == "flaky-sum"), key=lambda row: not row["lost"])
    assert (lost["lost"], kept["lost"]) == (True, False)
    assert lost["score"] == kept["score"]
    # One worker had only such rows.
    unknown = [row["score"] for row in rows if row["task"] == "dead-sum"]
    known = [row["score"] for row in rows if row["task"] != "dead-sum"]
    assert unknown == [pytest.approx(sum(known) / len(known))] * 2
    assert sorted(row["score"] for _, row in v1_rows(played) if row["task"] == "sum") == [0.0, 1.0]


def test_validation_is_separate_and_sampled_with_verls_settings(played: dict[str, Any]) -> None:
    assert [row["task"] for row in played["validation"]["rows"]] == ["plain"]
    assert {call["params"]["temperature"] for call in played["seen"][-2:]} == {0}
    assert {call["params"]["temperature"] for call in played["seen"][:-2]} == {1.0}


def test_verls_own_tool_gets_its_rows_arguments_and_its_rewards_are_handed_back(played: dict[str, Any]) -> None:
    rows = [row for _, row in legacy_rows(played) if row["task"] == "looked-up"]

    assert rows
    assert all(row["tool_rewards"] == [0.25] for row in rows)
    # The word is in no prompt: only the tool, with that row's tools_kwargs, can have told it.
    assert {row["score"] for row in rows} == {0.0, 1.0}


def test_sampled_tokens_stay_in_the_next_prompt_with_any_template(played: dict[str, Any]) -> None:
    facts = played["conversation"]

    assert facts["whole"][: len(facts["seen"])] == facts["seen"]
    assert facts["whole_text"] == (
        "\n<|im_start|>user\n<tool_response>a.txt</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert facts["text"] == "Looking.\n"
    assert [json.loads(call["function"]["arguments"]) for call in facts["calls"]] == [{"command": "ls"}]


def test_cut_off_answer_is_closed_before_the_conversation_continues(played: dict[str, Any]) -> None:
    assert played["conversation"]["cut_text"] == (
        "Look<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_text_of_an_answer_ends_before_its_stop_string(played: dict[str, Any]) -> None:
    assert played["conversation"]["plain"] == ["Final. ", []]


def test_parser_that_blocks_stops_no_other_rollout(played: dict[str, Any]) -> None:
    assert played["conversation"]["while_a_parser_blocks"] == "worked"


def test_verl_says_what_is_wrong_with_the_name_of_a_manager(played: dict[str, Any]) -> None:
    no_dot, no_module, no_attribute = played["loader_errors"]

    assert no_dot.startswith("ValueError: Invalid AgentLoopManager 'RolloutManager'")
    assert no_module.startswith("ImportError: Failed to import module 'agent_runtime.trainers.nowhere'")
    assert no_attribute.startswith("AttributeError: Class 'Manager' not found in module")


def test_tool_results_for_gpt_oss_have_verls_own_text(played: dict[str, Any]) -> None:
    assert len(played["gpt_oss"]) == 3
    assert all(ours == verls for ours, verls in played["gpt_oss"])

"""Training data: every sampled token exactly once, nothing else, and each with its own logprob and policy."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.token_history import TokenHistory
from agent_runtime.recording.branches import Branch, decode_branches, encode_branches, token_branches, token_forks
from rollout_api.records import IntentRecord, PolicySpan, Record, ResponseRecord

ids = st.lists(st.integers(0, 9), max_size=5)


@dataclass
class Script:
    """Turns, the whole prompt of each, and which of them begin a branch."""

    turns: list[ResponseRecord] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    script, history = Script(), TokenHistory()
    for number in range(draw(st.integers(1, 6))):
        so_far = history.ids
        extends = number > 0 and draw(st.booleans())
        prompt = so_far[: draw(st.integers(0, len(so_far)))] + draw(ids) if not extends else so_far + draw(ids)
        if prompt[: len(so_far)] != so_far or number == 0:
            script.starts.append(number)
        completion = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        keep, new = history.split(prompt)
        first = draw(st.integers(0, len(completion)))
        turn = ResponseRecord(
            turn=number,
            time=0,
            seconds=0,
            message={"role": "assistant"},
            finish_reason="stop",
            prompt_keep=keep,
            prompt_token_ids=new,
            completion_token_ids=completion,
            logprobs=[-number - position / 10 for position in range(len(completion))],
            policy_spans=[
                PolicySpan(tokens=first, version=str(number)),
                PolicySpan(tokens=len(completion) - first, version=str(number + 1)),
            ],
        )
        assert history.add(turn, number) == prompt
        script.turns.append(turn)
        script.prompts.append(prompt)
    return script


def sampled(branch: Branch) -> list[tuple[int, float, str | None]]:
    assert branch.logprobs is not None
    rows = zip(branch.token_ids, branch.mask, branch.logprobs, branch.policy_versions, strict=True)
    return [(token, logprob, version) for token, mask, logprob, version in rows if mask]


def expected(turn: ResponseRecord) -> list[tuple[int, float, str | None]]:
    first, last = turn.policy_spans
    versions = [first.version] * first.tokens + [last.version] * last.tokens
    return list(zip(turn.completion_token_ids or [], turn.logprobs or [], versions, strict=True))


@given(scripts())
def test_every_sampled_token_is_trained_on_exactly_once_with_its_logprob_and_policy(script: Script) -> None:
    rows = [row for turn in script.turns for row in expected(turn)]
    assert [row for branch in token_branches(script.turns) for row in sampled(branch)] == rows


@given(scripts())
def test_a_branch_is_the_very_sequence_that_the_server_saw(script: Script) -> None:
    branches = token_branches(script.turns)
    assert len(branches) == len(script.starts)
    for branch, start, end in zip(branches, script.starts, [*script.starts[1:], len(script.turns)], strict=True):
        for turn, prompt in zip(script.turns[start:end], script.prompts[start:end], strict=True):
            completion = turn.completion_token_ids or []
            seen = [*prompt, *completion]
            assert branch.token_ids[: len(seen)] == seen
            assert branch.mask[len(prompt) : len(seen)] == [1] * len(completion)
        assert len(branch.token_ids) == len(seen)


@given(scripts())
def test_tokens_are_read_as_they_were_stored(script: Script) -> None:
    branches = token_branches(script.turns)
    assert decode_branches("k", encode_branches(branches)) == branches


@given(scripts(), st.data())
def test_a_turn_without_token_ids_is_context_at_most_and_never_trained_on(script: Script, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, len(script.turns) - 1))
    silent = script.turns[missing].model_copy(
        update={"prompt_keep": 0, "prompt_token_ids": None, "completion_token_ids": None, "logprobs": None}
    )
    history, turns = TokenHistory(), []
    for number, (turn, prompt) in enumerate(zip(script.turns, script.prompts, strict=True)):
        keep, new = history.split(prompt)
        stored = turn.model_copy(update={"prompt_keep": keep, "prompt_token_ids": new})
        turns.append(silent if number == missing else stored)
        history.add(turns[-1], number)
    known = [row for turn in turns if turn is not silent for row in expected(turn)]
    assert [row for branch in token_branches(turns) for row in sampled(branch)] == known


@given(scripts())
def test_logprobs_are_given_only_where_all_sampled_tokens_have_one(script: Script) -> None:
    script.turns[-1] = script.turns[-1].model_copy(update={"logprobs": (script.turns[-1].logprobs or [])[:-1]})
    branches = token_branches(script.turns)
    assert [branch.logprobs is None for branch in branches] == [False] * (len(branches) - 1) + [True]


@given(scripts(), st.data())
def test_tokens_of_unknown_policy_are_in_the_sequence_and_not_trained_on(script: Script, data: st.DataObject) -> None:
    whole = [branch.token_ids for branch in token_branches(script.turns)]
    number = data.draw(st.integers(0, len(script.turns) - 1))
    known, unknown = script.turns[number].policy_spans
    script.turns[number] = script.turns[number].model_copy(
        update={"policy_spans": [known, unknown.model_copy(update={"version": None})]}
    )
    rows = [row for turn in script.turns for row in expected(turn) if row[2] is not None]
    branches = token_branches(script.turns)
    assert [row for branch in branches for row in sampled(branch)] == rows
    assert [branch.token_ids for branch in branches] == whole
    assert all(branch.logprobs is not None for branch in branches)


def test_answer_of_a_server_without_versions_is_trained() -> None:
    history = TokenHistory()
    keep, new = history.split([1, 2])
    turn = ResponseRecord(
        turn=0,
        time=0,
        seconds=0,
        message={},
        finish_reason="stop",
        prompt_keep=keep,
        prompt_token_ids=new,
        completion_token_ids=[3],
    )
    (branch,) = token_branches([turn])
    assert (branch.mask, branch.policy_versions) == ([0, 0, 1], [None, None, None])


def intent(turn: int, branch: int = 0, tools: list[dict[str, object]] | None = None) -> IntentRecord:
    return IntentRecord(turn=turn, time=0, keep=0, messages=[], branch=branch, tools=tools)


@given(scripts(), st.data())
def test_fork_counts_changed_encodings_but_not_rewritten_messages(script: Script, data: st.DataObject) -> None:
    records: list[Record] = []
    branch, forks = 0, 0
    for number, turn in enumerate(script.turns):
        rewrites = number > 0 and data.draw(st.booleans())
        new_tools = data.draw(st.booleans())
        branch += rewrites
        forks += number in script.starts[1:] and not rewrites and not new_tools
        records += [intent(number, branch, [] if new_tools or number == 0 else None), turn]
    assert token_forks(records) == forks

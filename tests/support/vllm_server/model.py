"""The model. By default each token is a function of the weights' version, the seed and all ids before it, so the
version that sampled a token can be computed: `made_by`, `logprobs_by`. Or a script determines the answers.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from tests.support.vllm_server.template import GENERATION_PROMPT, tool_call_text
from tests.support.vllm_server.tokenizer import SPECIAL, WORDS, tokenizer

# One token in so many ends the answer.
MEAN_TOKENS = 24
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A scripted answer; the end of the turn is added."""

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()

    @property
    def written(self) -> str:
        """Return the answer as the model writes it."""
        written = self.text
        for call in self.tool_calls:
            written = tool_call_text(written, call.name, dict(call.arguments))
        return written


@dataclass(frozen=True)
class Prompt:
    """The prompt, as a script gets it."""

    ids: Sequence[int]
    """Ids up to the answer's beginning, without tokens of the same answer that were sent back as a prefix."""
    session: str
    """X-Session-ID, or empty."""
    turn: int = field(default=0)
    """Number of the model's earlier answers."""

    @property
    def text(self) -> str:
        """Return the rendered conversation."""
        return tokenizer().decode(self.ids, special=True)


Script: TypeAlias = "Callable[[Prompt], Answer | str | None] | Mapping[str, Sequence[Answer | str]]"
"""A function of the prompt (None: as without a script). Or a list of answers for each session (`*`: for all others), of
which the turn's number selects one; after its end, as without a script.
"""


def made_by(
    version: int, prompt_ids: Sequence[int], count: int, *, seed: int = 0, ignore_eos: bool = False
) -> list[int]:
    """Return the first `count` tokens, or those up to the end of the turn, that this version samples after these ids."""
    state, previous, ids = state_of(prompt_ids), prompt_ids[-1], list[int]()
    eos = tokenizer().eos
    while len(ids) < count:
        previous = next_id(version, seed, state, previous, eos_allowed=not ignore_eos)
        ids.append(previous)
        if previous == eos:
            break
        state = state_after(state, previous)
    return ids


def logprobs_by(version: int, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Return the log probability that this version gives to each of these tokens, whatever version sampled them."""
    state, found = state_of(prompt_ids), []
    for token in ids:
        found.append(logprob_of(version, state, token))
        state = state_after(state, token)
    return found


def state_of(ids: Sequence[int]) -> int:
    """Return a context as one number, which determines the next token."""
    return zlib.crc32(array("I", ids).tobytes())


def state_after(state: int, token: int) -> int:
    """Return the context with one more token."""
    return zlib.crc32(_vocabulary().packed[token], state)


def next_id(version: int, seed: int, state: int, previous: int, *, eos_allowed: bool) -> int:
    """Return the token that this version samples in this context, whose last token is `previous`. Some of these tokens
    are ones that `encode` would have joined with the one before.
    """
    mixed = mix(state, version * 0xBF58476D1CE4E5B9 + seed * 0x94D049BB133111EB)
    words = _vocabulary()
    if eos_allowed and (mixed >> 40) % MEAN_TOKENS == 0:
        return words.eos
    if mixed >> 61 < 6 and (halves := words.halves.get(previous)):
        return halves[mixed % len(halves)]
    return words.sampled[mixed % len(words.sampled)]


def logprob_of(version: int, state: int, token: int) -> float:
    """Return a number between -4 and 0 that is exact in decimal and binary."""
    return -(1 + mix(state, version * 0xD6E8FEB86659FD93 + token) % 4096) / 1024


def scripted_ids(
    script: Script | None, prompt_ids: Sequence[int], session: str, *, cut: bool, anew: bool = False
) -> list[int] | None:
    """Return the rest of a script's answer; None if there is no script for the prompt.

    `cut`: a tool call's JSON breaks off in the middle, and the turn ends there. `anew`: return the whole answer,
    whatever part of it is in the prompt.
    """
    if script is None:
        return None
    head, begun = _split_answer(prompt_ids)
    turn = max(_occurrences(prompt_ids[:head], _vocabulary().answer_begins) - 1, 0)
    prompt = Prompt(prompt_ids[:head], session, turn)
    if callable(script):
        answer = script(prompt)
    else:
        turns = script.get(session, script.get("*", ()))
        answer = turns[turn] if turn < len(turns) else None
    if answer is None:
        return None
    written = answer if isinstance(answer, str) else answer.written
    if cut and "<tool_call>" in written:
        written = written[: written.index("<tool_call>") + len("<tool_call>\n") + 30].removesuffix("}")
    ids = sampled_ids(written, state_of(prompt.ids))
    if anew:
        return ids
    if begun == ids[: len(begun)]:
        return ids[len(begun) :]
    # The client has re-encoded what it had of the answer.
    have = tokenizer().decode(begun)
    return sampled_ids(written[len(have) :] if written.startswith(have) else written, state_of(prompt_ids))


def sampled_ids(text: str, state: int) -> list[int]:
    """Return the ids of a text as the model samples it, and of the end of the turn.

    About every other word is split as `encode` never does.
    """
    words = tokenizer()
    ids: list[int] = []
    for position, word in enumerate(re.findall(f"{SPECIAL.pattern}|{WORDS.pattern}", text)):
        data = word.encode()
        mixed = mix(state, position)
        if word in words.special_ids:
            ids.append(words.special_ids[word])
        elif len(data) > 1 and mixed & 1:
            at = 1 + (mixed >> 8) % (len(data) - 1)
            ids += (*words.encode_bytes(data[:at]), *words.encode_bytes(data[at:]))
        else:
            ids += words.encode_bytes(data)
    return [*ids, words.eos]


@dataclass(frozen=True)
class _Vocabulary:
    sampled: list[int]
    halves: dict[int, list[int]]
    """Return tokens that `encode` would have joined with the one before."""
    packed: list[bytes]
    eos: int
    answer_begins: list[int]


@cache
def _vocabulary() -> _Vocabulary:
    words = tokenizer()
    sampled = [token for token in range(256, words.first_special) if words.pieces[token].decode().strip().isalpha()]
    halves: dict[int, list[int]] = {}
    for left, right in words.ranks:
        if left in sampled and words.pieces[right].decode().isalpha():
            halves.setdefault(left, []).append(right)
    packed = [array("I", [token]).tobytes() for token in range(words.size)]
    return _Vocabulary(sampled, halves, packed, words.eos, words.encode(GENERATION_PROMPT))


def _split_answer(ids: Sequence[int]) -> tuple[int, list[int]]:
    """Return where the answer begins, and the part of it that exists already."""
    begins = _vocabulary().answer_begins
    for at in range(len(ids) - len(begins), -1, -1):
        if ids[at] == begins[0]:
            if list(ids[at : at + len(begins)]) == begins:
                return at + len(begins), list(ids[at + len(begins) :])
            break
    return len(ids), []


def _occurrences(ids: Sequence[int], wanted: list[int]) -> int:
    found = 0
    at = -1
    listed = list(ids)
    while True:
        try:
            at = listed.index(wanted[0], at + 1)
        except ValueError:
            return found
        found += listed[at : at + len(wanted)] == wanted


def mix(state: int, salt: int) -> int:
    mixed = (state * 0x9E3779B97F4A7C15 + salt + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 27)


def answers_from_json(answers: Mapping[str, Any]) -> dict[str, list[Answer | str]]:
    """Return a script from JSON: {session or *: [answer, ...]}, each a text or {text, tool_calls: [{name, arguments}]}."""
    return {session: [_answer_from_json(answer) for answer in turns] for session, turns in answers.items()}


def _answer_from_json(answer: Any) -> Answer | str:
    if isinstance(answer, str):
        return answer
    calls = [ToolCall(call["name"], call["arguments"]) for call in answer.get("tool_calls", ())]
    return Answer(answer.get("text", ""), calls)

"""Token sequences for training: exactly the ids of the server's prompts and samples, never tokenised again. As long as
each prompt extends the previous ids, all turns form one sequence. Otherwise (a template that rewrites history, a
compaction) another branch begins, as a separate sample. Every sampled token has mask 1 in exactly one branch, except
those of unknown policy version, which have mask 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from pydantic import TypeAdapter

from agent_runtime.recording.segments import compress, decompress, validated
from rollout_api.base import ApiModel
from rollout_api.records import BranchRecord, IntentRecord, ObjectDigest, Record, RecordedExperts, ResponseRecord


class ExpertPart(ApiModel):
    """Rows of one turn's array (`RecordedExperts`) that belong to consecutive tokens of a sequence."""

    object: ObjectDigest
    item_bytes: Literal[1, 2]
    first_row: int
    position: int
    """The token of the first row."""
    rows: int


class BranchExperts(ApiModel):
    """The routed experts of a sequence: where the rows of its tokens are. Tokens without a row are those whose experts no
    server reported, among them the last sampled one.
    """

    layers: int
    top_k: int
    parts: list[ExpertPart]
    """In the order of the tokens."""

    @property
    def reported(self) -> list[tuple[int, int]]:
        """Return the ranges of tokens with a row: first, and after the last."""
        spans: list[tuple[int, int]] = []
        for part in self.parts:
            begin = spans.pop()[0] if spans and spans[-1][1] == part.position else part.position
            spans.append((begin, part.position + part.rows))
        return spans


class Branch(ApiModel):
    """One sample. All lists have the same length, with one entry for each token."""

    token_ids: list[int]
    mask: list[int]
    """1: sampled by the policy, for training; 0: context, and tokens of unknown policy version."""
    logprobs: list[float] | None = None
    """As returned by the server; 0 if the mask is 0. None unless every token of mask 1 has one."""
    policy_versions: list[str | None]
    """The policy that sampled the token; None if the mask is 0, or if the server did not report it."""
    routed_experts: BranchExperts | None = None
    """None unless `model.routedExperts` is set."""


_BRANCH: TypeAdapter[Branch] = TypeAdapter(Branch)


@dataclass
class _Draft:
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[str | None] = field(default_factory=list)
    has_logprobs: bool = True
    is_copied: bool = False
    """Whether all its turns were copied from another rollout."""
    shape: tuple[int, int] | None = None
    """Layers and experts in each, of the first turn with routed experts."""
    parts: list[ExpertPart] = field(default_factory=list)

    def add_context(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.policy_versions += [None] * len(ids)

    def add_sampled(self, turn: ResponseRecord) -> None:
        ids = turn.completion_token_ids or []
        versions = versions_of(turn)
        mask = [0 if turn.policy_spans and version is None else 1 for version in versions]
        logprobs = turn.logprobs
        if logprobs is None or len(logprobs) != len(ids):
            self.has_logprobs = self.has_logprobs and not any(mask)
            logprobs = [0.0] * len(ids)
        self.token_ids += ids
        self.mask += mask
        self.policy_versions += versions
        self.logprobs += [logprob if trained else 0.0 for logprob, trained in zip(logprobs, mask, strict=True)]

    def add_experts(self, experts: RecordedExperts, earlier: int) -> None:
        """Add the rows of a turn. `earlier`: tokens of the earlier turns.

        A sampled token was chosen with the row of the token before it, as its own turn reported it. A later turn's row is
        from another pass, so it does not count.
        """
        self.shape = self.shape or (experts.layers, experts.top_k)
        if self.shape != (experts.layers, experts.top_k):
            return
        first_new = self.parts[-1].position + self.parts[-1].rows if self.parts else 0
        first_row = 0
        for begin, end in experts.spans:
            wanted = [
                position
                for position in range(max(begin, first_new), end)
                if position + 1 >= earlier or not self.mask[position + 1]
            ]
            for run in _runs(wanted):
                self.parts.append(
                    ExpertPart(
                        object=experts.object,
                        item_bytes=experts.item_bytes,
                        first_row=first_row + run[0] - begin,
                        position=run[0],
                        rows=len(run),
                    )
                )
            first_row += end - begin

    def copy_experts(self, tokens: int, into: "_Draft") -> None:
        """Add the rows of the first tokens to another sequence that begins with them."""
        into.shape = self.shape
        for part in self.parts:
            if (rows := min(part.rows, tokens - part.position)) > 0:
                into.parts.append(part.model_copy(update={"rows": rows}))

    def done(self) -> Branch:
        experts = None
        if self.shape is not None:
            experts = BranchExperts(layers=self.shape[0], top_k=self.shape[1], parts=self.parts)
        return Branch(
            routed_experts=experts,
            token_ids=self.token_ids,
            mask=self.mask,
            logprobs=self.logprobs if self.has_logprobs else None,
            policy_versions=self.policy_versions,
        )


def token_branches(records: Sequence[Record]) -> list[Branch]:
    """Return the branches of an attempt in order; turns without token ids are left out. Empty if no turn has them.

    Tokens copied from another rollout are context; a branch with only copied tokens is left out.
    """
    copied = copied_turn(records)
    drafts: list[_Draft] = []
    for turn in (record for record in records if isinstance(record, ResponseRecord)):
        if turn.prompt_token_ids is None or turn.completion_token_ids is None:
            continue
        seen = drafts[-1].token_ids if drafts else []
        if not drafts or turn.prompt_keep < len(seen):
            drafts.append(_Draft())
            drafts[-1].add_context(seen[: turn.prompt_keep])
            if len(drafts) > 1:
                # The first new token was chosen with the row of the prompt's last token, as this turn reports it.
                most = turn.prompt_keep + len(turn.prompt_token_ids) - 1
                drafts[-2].copy_experts(min(turn.prompt_keep, most), drafts[-1])
        earlier = len(drafts[-1].token_ids)
        drafts[-1].add_context(turn.prompt_token_ids)
        drafts[-1].add_sampled(turn)
        if turn.routed_experts is not None:
            drafts[-1].add_experts(turn.routed_experts, earlier)
        drafts[-1].is_copied = turn.turn <= copied
    return [draft.done() for draft in drafts if not draft.is_copied]


def _runs(positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive positions."""
    for _, run in groupby(enumerate(positions), lambda entry: entry[1] - entry[0]):
        yield [position for _, position in run]


def branch_of(records: Sequence[Record]) -> BranchRecord | None:
    """Return the origin of a branching attempt; None for others. Turns up to its `turn` are copies."""
    return next((record for record in records if isinstance(record, BranchRecord)), None)


def copied_turn(records: Sequence[Record]) -> int:
    """Return the last turn that was copied from another rollout; -1 if no turn was copied."""
    branch = branch_of(records)
    return -1 if branch is None else branch.turn


def has_own_answer(records: Sequence[Record]) -> bool:
    """Whether the policy has answered a model call. Answers that a branch copies belong to another rollout."""
    copied = copied_turn(records)
    return any(isinstance(record, ResponseRecord) and record.turn > copied for record in records)


def versions_of(turn: ResponseRecord) -> list[str | None]:
    """Return the policy version of each completion token; None if unknown."""
    count = len(turn.completion_token_ids or [])
    versions = [version for span in turn.policy_spans for version in [span.version] * span.tokens][:count]
    return versions + [None] * (count - len(versions))


def token_forks(records: Sequence[Record]) -> int:
    """Count the prompts whose ids did not extend the previous ids although their messages and tools did.

    An agent that rewrites its history or changes its tools also begins a branch, but without encoding any token again.
    Turns copied from another rollout do not count.
    """
    copied = copied_turn(records)
    forks = branch = seen = 0
    rewritten = True
    for record in records:
        if isinstance(record, IntentRecord):
            rewritten = rewritten or record.tools is not None or record.branch != branch
            branch = record.branch
        elif isinstance(record, ResponseRecord):
            if record.prompt_token_ids is None or record.completion_token_ids is None:
                continue
            forks += record.turn > copied and not rewritten and record.prompt_keep < seen
            seen = record.prompt_keep + len(record.prompt_token_ids) + len(record.completion_token_ids)
            rewritten = False
    return forks


def encode_branches(branches: Sequence[Branch]) -> bytes:
    """Return a tokens object: one line for each branch, compressed."""
    return compress(b"".join(_BRANCH.dump_json(branch) + b"\n" for branch in branches))


def decode_branches(key: str, data: bytes) -> list[Branch]:
    """Return the branches in such an object. Raises RecordCorrupt."""
    return [validated(key, _BRANCH.validate_json, line) for line in decompress(key, data).splitlines()]

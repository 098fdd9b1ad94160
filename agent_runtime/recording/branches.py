"""Token sequences for training: exactly the ids of the server's prompts and samples, never tokenised again. As long as
each prompt extends the previous ids, all turns form one sequence. Otherwise (a template that rewrites history, a
compaction) another branch begins, as a separate sample. Every sampled token has mask 1 in exactly one branch, except
those of unknown policy version, which have mask 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from agent_runtime.recording.segments import compress, decompress, validated
from rollout_api.base import ApiModel
from rollout_api.records import BranchRecord, IntentRecord, Record, ResponseRecord


class Branch(ApiModel):
    """One sample. All lists have the same length, with one entry for each token."""

    token_ids: list[int]
    mask: list[int]
    """1: sampled by the policy, for training; 0: context, and tokens of unknown policy version."""
    logprobs: list[float] | None = None
    """As returned by the server; 0 if the mask is 0. None unless every token of mask 1 has one."""
    policy_versions: list[str | None]
    """The policy that sampled the token; None if the mask is 0, or if the server did not report it."""


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

    def done(self) -> Branch:
        return Branch(
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
        drafts[-1].add_context(turn.prompt_token_ids)
        drafts[-1].add_sampled(turn)
        drafts[-1].is_copied = turn.turn <= copied
    return [draft.done() for draft in drafts if not draft.is_copied]


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

"""Token sequences to train on: exactly the ids that the server saw and sampled, never tokenised again.

While each turn's prompt ids extend what came before, all turns make one sequence. Where they do not (a template that
rewrites history, a compaction), the sequence forks: another branch begins, a sample of its own. Every sampled token has
mask 1 in exactly one branch, except those of unknown policy version, which have mask 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from agent_runtime.recording.segments import compress, decompress, validated
from rollout_api.base import ApiModel
from rollout_api.records import BranchRecord, IntentRecord, Record, ResponseRecord


class Branch(ApiModel):
    """One sample. All lists are equally long, an entry a token."""

    token_ids: list[int]
    mask: list[int]
    """1: sampled by the policy, to be trained on; 0: context, and tokens of unknown policy version."""
    logprobs: list[float] | None = None
    """As the server gave them; 0 where the mask is 0. None unless every token of mask 1 has one."""
    policy_versions: list[str | None]
    """The policy that sampled the token; None where the mask is 0, and in turns whose server did not say."""


_BRANCH: TypeAdapter[Branch] = TypeAdapter(Branch)


@dataclass
class _Draft:
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[str | None] = field(default_factory=list)
    has_logprobs: bool = True
    is_copied: bool = False
    """All of it so far is another rollout's."""

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
    """The branches of an attempt in order; turns without token ids are in none. Empty when no turn has them.

    What was copied from another rollout is context; a branch that has nothing else is left out.
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
    """Where the attempt went on from, None for one that began by itself. Turns up to its `turn` are copies."""
    return next((record for record in records if isinstance(record, BranchRecord)), None)


def copied_turn(records: Sequence[Record]) -> int:
    """The last turn that was copied from another rollout; -1 where none was."""
    branch = branch_of(records)
    return -1 if branch is None else branch.turn


def has_own_answer(records: Sequence[Record]) -> bool:
    """Whether the policy has answered a model call. The answers that a branch copies are another rollout's."""
    copied = copied_turn(records)
    return any(isinstance(record, ResponseRecord) and record.turn > copied for record in records)


def versions_of(turn: ResponseRecord) -> list[str | None]:
    """The policy version of each completion token; None where it is not known."""
    count = len(turn.completion_token_ids or [])
    versions = [version for span in turn.policy_spans for version in [span.version] * span.tokens][:count]
    return versions + [None] * (count - len(versions))


def token_forks(records: Sequence[Record]) -> int:
    """Times that a prompt's ids did not extend the ids before it although its messages and tools extended theirs.

    An agent that rewrites its history or changes its tools begins a branch too, but no token was encoded anew for it.
    """
    forks = branch = seen = 0
    rewritten = True
    for record in records:
        if isinstance(record, IntentRecord):
            rewritten = rewritten or record.tools is not None or record.branch != branch
            branch = record.branch
        elif isinstance(record, ResponseRecord):
            if record.prompt_token_ids is None or record.completion_token_ids is None:
                continue
            forks += not rewritten and record.prompt_keep < seen
            seen = record.prompt_keep + len(record.prompt_token_ids) + len(record.completion_token_ids)
            rewritten = False
    return forks


def encode_branches(branches: Sequence[Branch]) -> bytes:
    """A tokens object: a line a branch, compressed."""
    return compress(b"".join(_BRANCH.dump_json(branch) + b"\n" for branch in branches))


def decode_branches(key: str, data: bytes) -> list[Branch]:
    """What such an object holds. Raises RecordCorrupt."""
    return [validated(key, _BRANCH.validate_json, line) for line in decompress(key, data).splitlines()]

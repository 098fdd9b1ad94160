"""What the pages show of one rollout."""

import difflib
import json
import posixpath
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.messages import fold
from rollout_api.records import AttemptRecord, ObservationsRecord, Record, ResponseRecord, Result, StopRecord, Verdict
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import WORKING_DIR
from rolloutctl.ui.console import harmless
from rolloutctl.ui.transcript import Call, Step, readable_arguments, steps
from rolloutctl.viewer.token_text import TextOf

FIELD_CHARACTERS: Final = 20_000
"""Most characters of one message or tool result on a page. Longer ones are shortened in the middle."""
PAGE_CHARACTERS: Final = 4_000_000
"""Most characters of all steps of a page. When they are used up, `LEAST_CHARACTERS` of each field are shown."""
LEAST_CHARACTERS: Final = 500
RAW_CHARACTERS: Final = 5_000_000
STRIP_TOKENS: Final = 20_000
"""Most sampled tokens of a branch that the token strip shows."""
FILE_BYTES: Final = 200_000
"""Most bytes of an artifact that a page shows."""
MOST_FILES: Final = 5_000
DIFF_LINES: Final = 5_000
"""Most lines of a text that is compared: the time for a comparison grows with their square."""
EDITS: Final = (("old_str", "new_str"), ("old_string", "new_string"))
"""Names of the arguments with which the tools of this project and of widespread agents replace a text by another."""

Json = dict[str, Any]
_COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")


@dataclass(frozen=True)
class Rollout:
    """A rollout as its page shows it. Without a seal, `result` and `verdict` are None."""

    records: Sequence[Record]
    """Sorted by conversation."""
    result: Result | None = None
    verdict: Verdict | None = None
    advantage: float | None = None
    problem: str | None = None
    """Why its records cannot be read."""


def damaged(problem: str) -> Rollout:
    """Return a rollout whose records cannot be read."""
    return Rollout([], problem=problem)


def page(rollout: Rollout) -> Json:
    """Return the transcript, the timeline, the verdict and the facts of a rollout."""
    shortened = _Shortened()
    result = rollout.result
    return {
        "steps": [_step(step, shortened) for step in steps(rollout.records)],
        "timeline": timeline(rollout.records, result),
        "verdict": shortened.clean(rollout.verdict.wire()) if rollout.verdict else None,
        "result": None if result is None else shortened.clean(result.wire()),
        "advantage": rollout.advantage,
        "problem": rollout.problem,
    }


def timeline(records: Sequence[Record], result: Result | None) -> list[Json]:
    """Return spans of time: `boot`, `model` and `tools` by turn, and `verifier`. What is between them is the agent's own
    time and waiting. Times are Unix seconds.
    """
    spans: list[Json] = []
    for record in records:
        if isinstance(record, AttemptRecord) and record.boot_seconds:
            spans.append({"kind": "boot", "start": record.time - record.boot_seconds, "end": record.time})
        elif isinstance(record, ResponseRecord):
            spans.append(
                {"kind": "model", "turn": record.turn, "start": record.time - record.seconds, "end": record.time}
            )
        elif isinstance(record, ObservationsRecord) and record.seconds:
            names = ", ".join(dict.fromkeys(result.tool for result in record.results))
            start = record.time - record.seconds
            spans.append({"kind": "tools", "turn": record.turn, "name": names, "start": start, "end": record.time})
    seconds = result.seconds.get("verifier", 0) if result else 0
    if result and result.ended and seconds:
        stop = max(
            (record.time for record in records if isinstance(record, StopRecord)), default=result.ended - seconds
        )
        start = max(stop, result.ended - seconds)
        spans.append({"kind": "verifier", "start": start, "end": result.ended})
    return sorted(spans, key=lambda span: (span["start"], span["end"]))


def raw(records: Sequence[Record], turn: int) -> Json | None:
    """Return the request of a model call and its answer, as recorded; None for an unknown turn."""
    found = next((call for call in fold(records) if call.number == turn), None)
    if found is None:
        return None
    answer = (
        None if found.response is None else found.response.model_dump(exclude={"type", "prompt_token_ids"}, mode="json")
    )
    parts = {"messages": found.messages, "tools": found.tools, "response": answer}
    text = json.dumps(parts, indent=2, ensure_ascii=False, default=str)
    return {"text": visible(text[:RAW_CHARACTERS]), "isWhole": len(text) <= RAW_CHARACTERS}


def token_strip(branches: Iterable[Branch], text_of: TextOf | None = None) -> list[Json]:
    """Return for each branch its spans of context, as counts, and of sampled tokens, with ids, texts if a tokenizer is
    known, logprobs and policy.
    """
    return [{"tokens": len(branch.token_ids), "spans": _spans(branch, text_of)} for branch in branches]


def _spans(branch: Branch, text_of: TextOf | None) -> list[Json]:
    spans: list[Json] = []
    left = STRIP_TOKENS
    for position, (token, mask, version) in enumerate(
        zip(branch.token_ids, branch.mask, branch.policy_versions, strict=True)
    ):
        if not spans or spans[-1]["mask"] != mask or spans[-1]["policy"] != version:
            spans.append({"mask": mask, "policy": version, "count": 0, "ids": [], "texts": [], "logprobs": []})
        span = spans[-1]
        span["count"] += 1
        if mask and left > 0:
            left -= 1
            span["ids"].append(token)
            span["texts"] += [visible(text_of(token))] if text_of else []
            span["logprobs"].append(branch.logprobs[position] if branch.logprobs else None)
    return spans


def prepared_files(job: RolloutJob, group: int, records: Sequence[Record]) -> dict[str, bytes]:
    """Return the files that the workspace had from the start, by path relative to the working directory, as far as the
    run's record has them: those of tasks in the manifest, and of tasks that a plugin changed.
    """
    changed = next((r.task for r in reversed(records) if isinstance(r, AttemptRecord) and r.task is not None), None)
    inline = job.spec.tasks.inline or []
    task = changed or (inline[group] if group < len(inline) else None)
    folder = job.spec.sandbox.working_dir or WORKING_DIR
    return (
        {posixpath.relpath(posixpath.join(folder, file.path), folder): file.data() for file in task.files}
        if task
        else {}
    )


def files(archive: tarfile.TarFile, prepared: Mapping[str, bytes]) -> list[Json]:
    """Return the entries of an artifacts archive. Those of prepared files say whether they were changed."""
    kinds = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard link"}
    found = []
    for member in archive:
        kind = kinds.get(member.type, "file" if member.isreg() else "special")
        entry = {"path": visible(member.name), "kind": kind, "bytes": member.size, "mode": f"{member.mode:o}"}
        before = prepared.get(posixpath.normpath(member.name))
        if before is not None and kind == "file":
            content = archive.extractfile(member)
            is_same = member.size == len(before) and content is not None and content.read() == before
            entry["change"] = "unchanged" if is_same else "changed"
        found.append(entry)
        if len(found) >= MOST_FILES:
            break
    return found


def file_text(archive: tarfile.TarFile, path: str, prepared: Mapping[str, bytes]) -> Json | None:
    """Return the content of a file in an artifacts archive, and its difference from the prepared file; None if the
    archive does not contain that file.
    """
    member = next((member for member in archive if visible(member.name) == path and member.isreg()), None)
    content = archive.extractfile(member) if member else None
    if content is None or member is None:
        return None
    data = content.read(FILE_BYTES)
    if b"\0" in data:
        return {"text": None, "bytes": member.size, "isWhole": True, "diff": None}
    text, is_whole = visible(data.decode("utf-8", "replace")), member.size <= FILE_BYTES
    before = prepared.get(posixpath.normpath(member.name))
    is_compared = before is not None and before != data and is_whole and b"\0" not in before
    diff = difference(visible((before or b"").decode("utf-8", "replace")), text) if is_compared else None
    return {"text": text, "bytes": member.size, "isWhole": is_whole, "diff": diff}


def difference(before: str, after: str) -> str | None:
    """Return the changed lines with some context, in the colours of a terminal; None for long texts."""
    old, new = before.splitlines(), after.splitlines()
    if len(old) + len(new) > DIFF_LINES:
        return None
    lines = list(difflib.unified_diff(old, new, lineterm="", n=3))[2:]
    colours = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
    return "\n".join(f"{colours[line[0]]}{line}\x1b[0m" if line[:1] in colours else line for line in lines)


def visible(text: str) -> str:
    """Return a text whose control characters are visible, except those that set a colour. It is valid Unicode."""
    parts = _COLOUR.split(text)
    return "".join(part if number % 2 else harmless(part) for number, part in enumerate(parts))


class _Shortened:
    """Shortens long texts of a page."""

    def __init__(self) -> None:
        self._left = PAGE_CHARACTERS

    def text(self, text: str) -> str:
        most = FIELD_CHARACTERS if self._left > 0 else LEAST_CHARACTERS
        if len(text) > most:
            half = most // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters are not shown …\n{text[-half:]}"
        self._left -= len(text)
        return visible(text)

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.clean(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in value]
        return value


def _step(step: Step, shortened: _Shortened) -> Json:
    drawn = asdict(step)
    drawn["calls"] = [asdict(call) | _arguments(call) for call in step.calls]
    cleaned: Json = shortened.clean({name: value for name, value in drawn.items() if value or name == "turn"})
    return cleaned


def _arguments(call: Call) -> Json:
    """Return the arguments of a call as names and texts. Two that replace a text by another are shown as a difference."""
    pairs = dict(readable_arguments(call.arguments))
    edit = next((names for names in EDITS if set(names) <= pairs.keys()), None)
    diff = None if edit is None else difference(pairs[edit[0]], pairs[edit[1]])
    shown = [[name, text] for name, text in pairs.items() if diff is None or name not in (edit or ())]
    return {"arguments": shown} | ({"diff": diff} if diff else {})

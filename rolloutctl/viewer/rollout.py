"""What the pages show of one rollout."""

import difflib
import json
import posixpath
import re
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.messages import fold
from rollout_api.records import (
    AttemptRecord,
    ChangesRecord,
    ObservationsRecord,
    Record,
    ResponseRecord,
    Result,
    StopRecord,
    Verdict,
)
from rolloutctl.ui.console import harmless
from rolloutctl.ui.transcript import Call, Step, readable_arguments, steps
from rolloutctl.viewer.live import state
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
DIFF_SECONDS: Final = 1.0
"""Time for the comparisons of a page. When it is used up, texts are shown without a comparison."""
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
    task: str = ""
    member: int = 0


def page(rollout: Rollout) -> Json:
    """Return the transcript, the timeline, the verdict and the facts of a rollout."""
    shortened = _Shortened()
    result = rollout.result
    return {
        "task": visible(rollout.task),
        "member": rollout.member,
        "doing": None if result else shortened.clean(state(rollout.records)),
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


def changes(records: Sequence[Record]) -> dict[str, str]:
    """Return the recorded diff of what the agent changed in the prepared files, by path, in the colours of a terminal."""
    found = next((record.diff for record in reversed(records) if isinstance(record, ChangesRecord)), "")
    parts: dict[str, str] = {}
    for part in re.split(r"^(?=--- (?:a/|/dev/null)[^\n]*\n\+\+\+ )", found, flags=re.MULTILINE):
        lines = part.rstrip("\n").split("\n")
        if len(lines) > 1 and lines[0].startswith("--- "):
            after, before = lines[1].removeprefix("+++ "), lines[0].removeprefix("--- ")
            path = (before if after == "/dev/null" else after)[2:]
            parts[visible(path)] = _coloured(map(visible, lines[2:]))
    return parts


def files(archive: tarfile.TarFile | None, changed: Mapping[str, str]) -> list[Json]:
    """Return the entries of an artifacts archive and the files that the agent deleted; those that it changed come first."""
    kinds = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard link"}
    found: dict[str, Json] = {}
    is_whole = True
    for member in archive or ():
        kind = kinds.get(member.type, "file" if member.isreg() else "special")
        path = visible(posixpath.normpath(member.name))
        found[path] = {"path": path, "kind": kind, "bytes": member.size, "mode": f"{member.mode:o}"}
        if path in changed:
            found[path]["change"] = "new" if _is_new(changed[path]) else "changed"
        if len(found) >= MOST_FILES:
            is_whole = False
            break
    gone = [
        {"path": path, "kind": "deleted", "bytes": 0, "mode": ""}
        for path, diff in changed.items()
        # A path that is not printable has another form in the archive.
        if path not in found and not _is_new(diff) and (is_whole or "+0,0 @@" in diff.split("\n", 1)[0])
    ]
    first = [entry for entry in found.values() if "change" in entry]
    return [*first, *gone, *(entry for entry in found.values() if "change" not in entry)]


def _is_new(diff: str) -> bool:
    return "@@ -0,0 " in diff[:20]


def file_text(archive: tarfile.TarFile, path: str) -> Json | None:
    """Return the content of a file in an artifacts archive; None if the archive does not contain that file."""
    member = next((m for m in archive if visible(posixpath.normpath(m.name)) == path and m.isreg()), None)
    content = archive.extractfile(member) if member else None
    if content is None or member is None:
        return None
    data = content.read(FILE_BYTES)
    if b"\0" in data:
        return {"text": None, "bytes": member.size, "isWhole": True}
    text = visible(data.decode("utf-8", "replace"))
    return {"text": text, "bytes": member.size, "isWhole": member.size <= FILE_BYTES}


def difference(before: str, after: str) -> str | None:
    """Return the changed lines with some context, in the colours of a terminal; None for long texts."""
    old, new = before.splitlines(), after.splitlines()
    if len(old) + len(new) > DIFF_LINES:
        return None
    return _coloured(list(difflib.unified_diff(old, new, lineterm="", n=3))[2:])


def _coloured(lines: Iterable[str]) -> str:
    colours = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
    return "\n".join(f"{colours[line[0]]}{line}\x1b[0m" if line[:1] in colours else line for line in lines)


def visible(text: str) -> str:
    """Return a text whose control characters are visible, except those that set a colour. It is valid Unicode."""
    parts = _COLOUR.split(text)
    return "".join(part if number % 2 else harmless(part) for number, part in enumerate(parts))


class _Shortened:
    """Shortens long texts of a page, and compares texts while there is time."""

    def __init__(self) -> None:
        self._left = PAGE_CHARACTERS
        self._diff_seconds = DIFF_SECONDS

    def difference(self, before: str, after: str) -> str | None:
        if self._diff_seconds <= 0:
            return None
        began = time.perf_counter()
        found = difference(before, after)
        self._diff_seconds -= time.perf_counter() - began
        return found

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
    drawn["calls"] = [asdict(call) | _arguments(call, shortened) for call in step.calls]
    cleaned: Json = shortened.clean({name: value for name, value in drawn.items() if value or name == "turn"})
    return cleaned


def _arguments(call: Call, shortened: _Shortened) -> Json:
    """Return the arguments of a call as names and texts. Two that replace a text by another are shown as a difference."""
    pairs = dict(readable_arguments(call.arguments))
    edit = next((names for names in EDITS if set(names) <= pairs.keys()), None)
    diff = None if edit is None else shortened.difference(pairs[edit[0]], pairs[edit[1]])
    shown = [[name, text] for name, text in pairs.items() if diff is None or name not in (edit or ())]
    return {"arguments": shown} | ({"diff": diff} if diff else {})

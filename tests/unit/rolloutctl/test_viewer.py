"""The viewer's table, filters and server."""

import asyncio
import contextlib
import dataclasses
import io
import json
import math
import operator
import os
import re
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_runtime.engine.health import WRITE_SECONDS
from agent_runtime.recording.branches import Branch
from agent_runtime.recording.health import HealthReport
from agent_runtime.recording.reader import NoSuchRun, open_run
from agent_runtime.recording.segments import encode, json_bytes
from agent_runtime.recording.store import StorageUnavailable, Store
from rollout_api.records import (
    ArtifactsRecord,
    ChangesRecord,
    Outcome,
    PluginReport,
    Record,
    ResponseRecord,
    StopRecord,
)
from rolloutctl import viewer
from rolloutctl.errors import CommandError
from rolloutctl.ui.transcript import Call
from rolloutctl.viewer.library import FRESH_SECONDS, Library
from rolloutctl.viewer.live import InFlight, state
from rolloutctl.viewer.rollout import (
    DIFF_LINES,
    MOST_FILES,
    Rollout,
    _arguments,
    _Shortened,
    changes,
    difference,
    file_text,
    files,
    token_strip,
    visible,
)
from rolloutctl.viewer.server import EVENT_SECONDS, serving
from rolloutctl.viewer.summary import _speed
from rolloutctl.viewer.table import COLUMNS, KINDS, RolloutTable
from rolloutctl.viewer.token_text import open_tokenizer
from rolloutctl.viewer.where import TEXT_FIELDS, WrongCondition, sql
from tests.support.made_up_runs import BEGAN, made_up_rollout, write_rollout, write_run
from tests.support.recorded_run import record_run
from tests.support.records import answered, asked, completed

Row = Mapping[str, Any]

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 60),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]),
    st.sampled_from(["hard", "easy", "Completed", "Finished", "fix-parser-0", "PARSER", "", "SandboxLost"]),
)
COMPARISONS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in"]),
        "field": st.sampled_from([column.name for column in COLUMNS]),
        "value": VALUES,
    }
)
WORDS = st.fixed_dictionaries({"op": st.just("text"), "value": st.sampled_from(["parser", "HARD", "node", "x"])})
ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
CONDITIONS = st.recursive(
    COMPARISONS | WORDS,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"op": st.sampled_from(["and", "or"]), "terms": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"op": st.just("not"), "term": inner}),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> RolloutTable:
    found = RolloutTable(Store.open(str(tmp_path_factory.mktemp("table")), {}))
    found._insert(_line(index) for index in range(60))
    return found


def _line(index: int) -> Any:
    result = made_up_rollout(index, hostile=False, turns=1).result
    assert result is not None
    return index, result.model_dump_json(exclude_none=True).encode(), result.outcome.value, result.reward, None


def fits(where: Mapping[str, Any], row: Row) -> bool:
    """As frontend/src/where.ts; the browser tests compare that one with the server."""
    match where["op"]:
        case "and":
            return all(fits(term, row) for term in where["terms"])
        case "or":
            return any(fits(term, row) for term in where["terms"])
        case "not":
            return not fits(where["term"], row)
        case "text":
            texts = (row.get(name, "") for name in TEXT_FIELDS)
            return any(where["value"].lower() in str(text).lower() for text in texts)
    actual: Any = row.get(where["field"])
    value: Any = where["value"]
    kind = KINDS[where["field"]]
    if kind == "list":
        has = str(value) in actual if where["op"] == "in" else value in actual
        return bool(has) if where["op"] in ("==", "in") else where["op"] == "!=" and not has
    if where["op"] == "in":
        shown = str(int(actual)) if isinstance(actual, bool) else "" if actual is None else str(actual)
        return str(value).lower() in shown.lower()
    if where["op"] in ("==", "!="):
        return bool((actual == value) == (where["op"] == "=="))
    if actual is None or value is None or isinstance(value, str) != isinstance(actual, str):
        return False
    return bool(ORDERS[where["op"]](actual, value))


@example({"op": "not", "term": {"op": "==", "field": "tag", "value": None}})
@given(CONDITIONS)
def test_a_condition_finds_what_it_says(table: RolloutTable, where: Mapping[str, Any]) -> None:
    rows = table.rows(limit=1000)
    found = [row["index"] for row in table.rows(where, limit=1000)]
    assert found == [row["index"] for row in rows if fits(where, row)]
    assert table.count(where) == len(found)
    count, groups = table.groups(where, limit=1000)
    assert sorted(row["index"] for group in groups for row in group) == found
    assert count == len(groups)


@pytest.mark.parametrize(
    "where",
    [
        {},
        [],
        {"op": "and", "terms": []},
        {"op": "and", "terms": "x"},
        {"op": "==", "field": 'x" OR 1', "value": 1},
        {"op": "; DROP TABLE rollouts", "field": "reward", "value": 1},
        {"op": "==", "field": "reward", "value": {"a": 1}},
        {"op": "and", "terms": [{"op": "text", "value": "x"}] * 300},
        json.loads('{"op": "not", "term": ' * 60 + '{"op": "text", "value": "x"}' + "}" * 60),
        {"op": "==", "field": "index", "value": 10**30},
    ],
)
def test_what_is_no_condition_is_refused(where: Any) -> None:
    with pytest.raises(WrongCondition):
        sql(where, KINDS)


@pytest.mark.parametrize("op", ["==", "<", "in"])
def test_condition_with_an_unpaired_surrogate_finds_nothing(table: RolloutTable, op: str) -> None:
    assert table.count({"op": op, "field": "task", "value": "\ud800"}) == 0
    assert table.count({"op": "text", "value": "\ud800"}) == 0


def test_rows_come_sorted_and_in_parts(table: RolloutTable) -> None:
    every = table.rows(sort="reward", descending=True, limit=1000)
    rewards = [row.get("reward") for row in every]
    graded = [reward for reward in rewards if reward is not None]
    assert graded == sorted(graded, reverse=True)
    assert rewards[len(graded) :] == [None] * (len(rewards) - len(graded)), "those without a value come last"
    parts = [
        row for offset in (0, 25, 50) for row in table.rows(sort="reward", descending=True, offset=offset, limit=25)
    ]
    assert parts == every


def test_a_learning_curve_has_a_point_for_each_label_in_the_order_of_submission(tmp_path: Path) -> None:
    labels = ["b", "b", "a", None, "a"]
    rewards = [1.0, 0.0, 1.0, 1.0, None]
    rollouts = []
    for index, (label, reward) in enumerate(zip(labels, rewards, strict=True)):
        made = made_up_rollout(index, group_size=1, hostile=False)
        assert made.result is not None
        outcome = Outcome.COMPLETED if reward is not None else Outcome.INFRA_FAILED
        changed = {"batch": label, "reward": reward, "outcome": outcome}
        rollouts.append(Rollout(made.records, made.result.model_copy(update=changed), made.verdict))

    async def curve(name: str, chosen: list[Rollout]) -> list[tuple[str, int, float]]:
        write_run(tmp_path, name, chosen, group_size=1)
        library = Library(Store.open(str(tmp_path), {}))
        folder = next(row["folder"] for row in await library.rows() if row["name"] == name)
        run = await library.run(folder)
        await run.read()
        points = [(point["label"], point["graded"], point["mean"]) for point in run.summary()["labels"]]
        await library.close()
        return points

    assert asyncio.run(curve("labelled", rollouts[::-1])) == [("b", 2, 0.5), ("a", 1, 1.0)]
    assert asyncio.run(curve("unlabelled", rollouts[3:4])) == []


async def test_summary_has_exceptions_of_own_code_verifier_problems_and_the_rate(tmp_path: Path) -> None:
    now = time.time()
    rollouts = []
    for index in range(4):
        rollout = made_up_rollout(index, hostile=False, turns=1)
        assert rollout.result is not None
        changed = {
            "tool_tracebacks": {"boom": "Traceback\nRuntimeError: kaput"},
            "plugins": {"own:Judge": PluginReport(calls=1, failed=1, error="filter_tool_call: ValueError: no")},
            "verifier_message": "\x1b[31mreward.txt\x1b[0m was \u202enot written",
            "started": now - 60.0,
            "ended": now - 1.0,
        }
        rollouts.append(Rollout(rollout.records, rollout.result.model_copy(update=changed), rollout.verdict))
    folder = write_run(tmp_path, "own", rollouts, finished=False, total=8)
    library = Library(Store.open(str(tmp_path), {}))
    run = await library.run(folder.name)
    await run.read()
    summary = run.summary()
    of_open_job = _speed(run.table, None, now)
    await library.close()
    causes = {cause["where"] for cause in summary["causes"]}
    assert 'toolError == "boom: RuntimeError: kaput"' in causes
    assert 'pluginError == "own:Judge: filter_tool_call: ValueError: no"' in causes
    assert 'verifierError == "reward.txt was \\\\u202enot written"' in causes, "a filter of what the page shows"
    assert 3 < summary["perMinute"] < 4.1, "the rollouts took a minute, though they ended in the same second"
    assert 3 < of_open_job["perMinute"] < 4.1
    assert of_open_job["secondsLeft"] is None


async def test_parts_of_the_time_are_all_of_it_together(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "times", [made_up_rollout(index, hostile=False) for index in range(8)])
    library = Library(Store.open(str(tmp_path), {}))
    run = await library.run(folder.name)
    await run.read()
    *parts, total = run.summary()["parts"]
    await library.close()
    assert [part["name"] for part in parts] == ["boot", "model", "tools", "verifier", "rest"]
    assert (total["name"], total["share"]) == ("total", 1)
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert parts[-1]["share"] > 0


def test_what_an_attempt_does_is_in_its_last_records() -> None:
    records = made_up_rollout(0, hostile=False).records
    doing = [state(records[: number + 1])["doing"] for number in range(4)]
    assert doing == ["starting", "model", "tool bash", "agent"]
    assert state(records)["doing"] == "storing artifacts"


async def test_turn_of_a_rollout_that_is_graded_is_its_last_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "graded", [], total=1, group_size=1, finished=False)
    records = made_up_rollout(0, hostile=False).records
    assert isinstance(records[-1], StopRecord)
    segments = [records[:-1], records[-1:], [ArtifactsRecord(time=0, key="k", bytes=0)]]
    (folder / "attempts" / "0" / "0").mkdir(parents=True)
    for number, part in enumerate(segments):
        (folder / "attempts" / "0" / "0" / f"1-{number}.jsonl.zst").write_bytes(encode(part))
    run = await open_run(Store.open(str(tmp_path), {}), folder.name)
    _, [found] = await InFlight(run).look([])
    assert found["doing"] == "grading"
    assert found["turn"] == max(record.turn + 1 for record in records if isinstance(record, ResponseRecord))


def test_only_colours_of_a_text_stay_control_characters() -> None:
    assert visible("\x1b[31mred\x1b[0m\x1b]0;title\x07\x00\u202e\ud800") == "\x1b[31mred\x1b[0m\\x00\\u202e\\ud800"


@contextlib.asynccontextmanager
async def client(output: Path) -> AsyncIterator[aiohttp.ClientSession]:
    library = Library(Store.open(str(output), {}))
    async with serving(library, host="127.0.0.1", port=0, token="t0ken") as url, aiohttp.ClientSession() as http:
        http.headers["x-url"] = url
        yield http


async def test_the_server_answers_only_with_the_token_and_says_what_is_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", [made_up_rollout(index, hostile=False) for index in range(4)], group_size=4).name
    stopped = write_run(tmp_path, "b", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    write_rollout(stopped, Rollout(made_up_rollout(1).records[:2]))
    async with client(tmp_path) as http:
        url = http.headers.pop("x-url")
        origin = url.removesuffix("t0ken/")

        async def get(where: str, **parameters: str) -> tuple[int, Any]:
            async with http.get(where if "://" in where else f"{url}api/{where}", params=parameters) as response:
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                assert response.headers["Referrer-Policy"] == "no-referrer"
                return response.status, json.loads(await response.text())

        async def rollouts(run: str, where: Any) -> tuple[int, Any]:
            return await get(f"rollouts?where={quote(json.dumps(where))}", run=run)

        async with http.get(f"{url}api/events", params={"run": folder}) as events:
            assert events.headers["X-Accel-Buffering"] == "no"
        for path in ("", "api/runs", "app.js", "t0ke/"):
            assert (await get(origin + path))[0] == 404
        status, listed = await get("runs")
        assert status == 200
        assert [(run["folder"], run["state"], run["sealed"]) for run in listed["runs"]] == [
            (stopped.name, "unfinished", 1),
            (folder, "finished", 4),
        ]
        assert [set(run) for run in listed["runs"]] == [set(listed["runs"][0])] * 2, "the same facts of every run"
        assert (await get("run", run="../a"))[0] == 404
        status, missing = await get("rollout", run=folder, index="9")
        assert (status, missing["error"]) == (404, f"rollout 9 of {folder} has not begun")
        assert (await get("rollout", run=folder, index="-1"))[0] == 400
        assert (await get("rollouts", run=folder, sort="nothing"))[0] == 400
        assert (await get("rollouts?where={", run=folder))[0] == 400
        assert (await rollouts(folder, {"op": "=="}))[0] == 400
        assert (await get("file", run=folder, index="0", path="../../etc/passwd"))[0] == 404
        assert (await get("compare", before=folder, after=folder, show="best"))[0] == 400
        assert (await get("compare", before=folder, after=folder))[1]["counts"]["all"] == 1
        status, found = await rollouts(folder, {"op": ">=", "field": "index", "value": 2})
        assert (status, found["count"]) == (200, 2)


async def test_events_end_with_their_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    async with client(tmp_path) as http:
        url = http.headers.pop("x-url")
        async with http.get(f"{url}api/events", params={"run": stopped.name}) as events:
            await events.content.readline()
    await asyncio.sleep(2 * EVENT_SECONDS)
    assert "closed database" not in caplog.text


async def test_tokens_of_a_rollout_without_token_ids_are_not_found(tmp_path: Path) -> None:
    records: list[Record] = [asked(0, 0, {"role": "user", "content": "Hello."}), answered(0, {"role": "assistant"})]
    run = await record_run(tmp_path, [(completed(0, turns=1), records)])
    async with client(tmp_path) as http:
        url = http.headers.pop("x-url")
        async with http.get(f"{url}api/tokens", params={"run": run.folder, "index": "0"}) as response:
            assert response.status == 404
            assert "has no token ids" in (await response.json())["error"]


def archive_of(entries: Mapping[str, bytes]) -> tarfile.TarFile:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, data in entries.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return tarfile.open(fileobj=io.BytesIO(file.getvalue()))


def test_recorded_changes_are_shown_by_file() -> None:
    diff = "\n".join(
        [
            *("--- a/a.py", "+++ b/a.py", "@@ -1,2 +1,2 @@", " one", "-two", "+2"),
            *("--- /dev/null", "+++ b/new.py", "@@ -0,0 +1,1 @@", "+--- a/a.py"),
            *("--- a/gone.py", "+++ /dev/null", "@@ -1,1 +0,0 @@", "-x"),
            *("--- a/big", "+++ b/big", "(changed; too large or not text)"),
            "Further files may have changed.",
        ]
    )
    found = changes([ChangesRecord(time=0, diff="older"), ChangesRecord(time=1, diff=diff)])
    assert list(found) == ["a.py", "new.py", "gone.py", "big"]
    assert "\x1b[31m-two\x1b[0m\n\x1b[32m+2\x1b[0m" in found["a.py"]
    assert found["big"] == "(changed; too large or not text)\nFurther files may have changed."
    left = archive_of({"./a.py": b"one\n2\n", "same.py": b"x\n", "new.py": b"--- a/a.py\n", "big": b"\0"})
    entries = [(entry["path"], entry["kind"], entry.get("change")) for entry in files(left, found)]
    assert entries == [
        ("a.py", "file", "changed"),
        ("new.py", "file", "new"),
        ("big", "file", "changed"),
        ("gone.py", "deleted", None),
        ("same.py", "file", None),
    ]
    shown = file_text(left, "a.py")
    assert shown is not None
    assert shown["text"] == "one\n2\n"
    assert files(None, {}) == []
    assert changes([]) == {}


def test_edit_by_a_tool_is_shown_as_a_difference() -> None:
    edit = {"command": "str_replace", "path": "a.py", "old_str": "a\nb", "new_str": "a\nc"}
    shown = _arguments(Call("editor", json.dumps(edit)), _Shortened())
    assert [name for name, _ in shown["arguments"]] == ["command", "path"]
    assert "-b" in shown["diff"]
    assert "+c" in shown["diff"]
    assert "diff" not in _arguments(Call("bash", json.dumps({"command": "ls"})), _Shortened())


async def test_comparison_has_the_worst_tasks_and_is_made_again_only_while_a_run_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = [made_up_rollout(index, hostile=False) for index in range(64)]
    before = write_run(tmp_path, "before", rollouts)
    after = write_run(
        tmp_path, "after", [rewarded(rollout, 0.5) for rollout in rollouts[:-1]], total=64, finished=False
    )
    read_at_each_look(monkeypatch)
    library = Library(Store.open(str(tmp_path), {}))
    try:
        runs = await library.run(before.name), await library.run(after.name)
        found = await library.compare(*runs)
        page = found.part("worse", 2)
        worst = sorted((later - earlier, task) for task, (earlier, later) in found.tasks.items() if later < earlier)[:2]
        assert [row["task"] for row in page["tasks"]] == [task for _, task in worst]
        counts = page["counts"]
        assert counts["all"] == 8
        assert counts["changed"] == counts["better"] + counts["worse"] > 0
        write_rollout(after, rewarded(rollouts[-1], 1))
        await library.run(after.name)
        again = await library.compare(*runs)
        assert again.tasks != found.tasks
        same = runs[0], runs[0]
        assert await library.compare(*same) is await library.compare(*same)
    finally:
        await library.close()


def rewarded(rollout: Rollout, reward: float) -> Rollout:
    assert rollout.result is not None
    given = {"reward": reward, "outcome": Outcome.COMPLETED}
    return dataclasses.replace(rollout, result=rollout.result.model_copy(update=given))


def test_long_texts_are_not_compared() -> None:
    long = "line\n" * DIFF_LINES
    assert difference(long, "x") is None
    edit = {"old_str": long, "new_str": "x"}
    assert [name for name, _ in _arguments(Call("editor", json.dumps(edit)), _Shortened())["arguments"]] == [
        "old_str",
        "new_str",
    ]


def test_edits_are_shown_without_a_difference_when_the_time_for_comparisons_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rolloutctl.viewer.rollout.DIFF_SECONDS", 1e-9)
    shortened, edit = _Shortened(), json.dumps({"old_str": "a", "new_str": "b"})
    first, second = (_arguments(Call("editor", edit), shortened) for _ in range(2))
    assert "+b" in first["diff"]
    assert "diff" not in second
    assert second["arguments"] == [["old_str", "a"], ["new_str", "b"]]


def test_token_strip_has_texts_where_a_tokenizer_is_given() -> None:
    branch = Branch(token_ids=[1, 2, 3], mask=[0, 1, 1], logprobs=[0.0, -1.0, -2.0], policy_versions=[None, "1", "1"])
    (plain,), (told,) = token_strip([branch]), token_strip([branch], {2: " the", 3: "\x07"}.__getitem__)
    assert [span["texts"] for span in plain["spans"]] == [[], []]
    assert [span["texts"] for span in told["spans"]] == [[], [" the", "\\x07"]]


def test_tokenizer_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CommandError, match=r"install agent-rollouts\[tokens\]"):
        open_tokenizer(tmp_path)


def read_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutctl.viewer.library.FRESH_SECONDS", 0)
    monkeypatch.setattr("rolloutctl.viewer.library.BUSY_SHARE", math.inf)


def test_pages_of_live_runs_are_at_most_two_seconds_old() -> None:
    """Of records that are read at once; others wait by BUSY_SHARE."""
    parts = (Path(viewer.__file__).parent / "frontend" / "src" / "parts.tsx").read_text()
    page_seconds = int(re.findall(r"LOOK_MILLISECONDS = (\d+)", parts)[0]) / 1000
    assert WRITE_SECONDS + FRESH_SECONDS + max(page_seconds, EVENT_SECONDS) <= 2


async def test_list_of_runs_is_read_again_when_it_is_no_longer_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    (folder / "health").mkdir()
    (folder / "health" / "0.json").write_bytes(json_bytes(HealthReport(time=time.time())))
    library = Library(Store.open(str(tmp_path), {}))
    try:
        monkeypatch.setattr("rolloutctl.viewer.library.FRESH_SECONDS", 3600)
        assert [row["sealed"] for row in await library.rows()] == [1]
        write_rollout(folder, made_up_rollout(1))
        assert [row["sealed"] for row in await library.rows()] == [1]
        read_at_each_look(monkeypatch)
        assert [row["sealed"] for row in await library.rows()] == [2]
    finally:
        await library.close()


async def test_stopped_runs_are_closed_until_a_process_works_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c"]
    folders = {
        name: write_run(tmp_path, name, [made_up_rollout(0)], group_size=4, total=8, finished=False) for name in names
    }
    read_at_each_look(monkeypatch)
    library = Library(Store.open(str(tmp_path), {}))
    try:
        await library.run(folders["a"].name)
        for _ in range(2):
            rows = {row["name"]: row for row in await library.rows()}
            assert {name: (row["sealed"], row["state"]) for name, row in rows.items()} == dict.fromkeys(
                names, (1, "unfinished")
            )
            assert list(library._open) == [folders["a"].name], "only the one whose page was asked for"
        write_rollout(folders["b"], made_up_rollout(1))
        (folders["b"] / "health").mkdir()
        (folders["b"] / "health" / "0.json").write_bytes(json_bytes(HealthReport(time=time.time())))
        rows = {row["name"]: row for row in await library.rows()}
        assert (rows["b"]["sealed"], rows["b"]["state"]) == (2, "running")
        assert folders["b"].name in library._open
    finally:
        await library.close()


async def test_run_with_a_damaged_job_file_is_listed_as_damaged(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=1)
    intact = write_run(tmp_path, "b", [made_up_rollout(0)], group_size=1)
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | {"manifest": job["manifest"] | {"kind": "Other"}}))
    library = Library(Store.open(str(tmp_path), {}))
    try:
        rows = {row["folder"]: row for row in await library.rows()}
        assert set(rows[folder.name]) == set(rows[intact.name])
        assert rows[folder.name]["damaged"].startswith(f"{folder.name}/job.json: manifest.kind: ")
        with pytest.raises(NoSuchRun, match="Restore this file from a copy"):
            await library.run(folder.name)
    finally:
        await library.close()


async def test_error_that_ended_a_run_is_in_its_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    (folder / "health").mkdir()
    report = HealthReport(time=time.time(), ended=True, error="The agent's own code raised\nTraceback")
    (folder / "health" / "0.json").write_bytes(json_bytes(report))
    library = Library(Store.open(str(tmp_path), {}))
    try:
        summary = (await library.run(folder.name)).summary()
        assert (summary["state"], summary["error"]) == ("unfinished", "The agent's own code raised\nTraceback")
    finally:
        await library.close()


async def test_duration_of_a_copied_run_is_that_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=1, created=BEGAN)
    os.utime(run / "stats.json", (BEGAN + 1e6, BEGAN + 1e6))
    library = Library(Store.open(str(tmp_path), {}))
    try:
        (row,) = await library.rows()
        result = made_up_rollout(0).result
        assert result is not None
        assert result.ended == BEGAN + row["duration"]
    finally:
        await library.close()


async def test_stopped_run_is_read_again_when_a_process_has_worked_on_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, "a", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    read_at_each_look(monkeypatch)
    library = Library(Store.open(str(tmp_path), {}))
    try:
        assert [row["sealed"] for row in await library.rows()] == [1]
        write_rollout(folder, made_up_rollout(1))
        (folder / "health").mkdir()
        (folder / "health" / "0.json").write_bytes(json_bytes(HealthReport(time=time.time(), ended=True)))
        assert [(row["sealed"], row["state"]) for row in await library.rows()] == [(2, "unfinished")]
    finally:
        await library.close()


async def test_stopped_run_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "a", [made_up_rollout(0)], group_size=4, total=8, finished=False)
    read_at_each_look(monkeypatch)
    library = Library(Store.open(str(tmp_path), {}))
    try:
        with monkeypatch.context() as unavailable:
            unavailable.setattr(
                "rolloutctl.viewer.library.read_abort", AsyncMock(side_effect=StorageUnavailable("503"))
            )
            assert [row["damaged"] for row in await library.rows()] == ["StorageUnavailable: 503"]
        assert [(row["damaged"], row["sealed"]) for row in await library.rows()] == [(None, 1)]
    finally:
        await library.close()


def test_changed_files_beyond_those_that_are_listed_do_not_count_as_deleted() -> None:
    names = [f"{number}.txt" for number in range(MOST_FILES + 1)]
    found = files(archive_of(dict.fromkeys(names, b"")), {names[-1]: "@@ -1 +1 @@", "gone": "@@ -1 +0,0 @@"})
    assert [entry["path"] for entry in found if entry["kind"] == "deleted"] == ["gone"]


def test_new_file_whose_name_is_not_printable_does_not_count_as_deleted() -> None:
    found = files(archive_of({"a\nb": b""}), {r"'a\\nb'": "@@ -0,0 +1 @@\n+x"})
    assert [entry["kind"] for entry in found] == ["file"]

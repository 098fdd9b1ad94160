"""The viewer's pages, and the report that is made of them, in a real browser."""

import asyncio
import base64
import contextlib
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent_runtime.recording.health import HealthReport
from agent_runtime.recording.segments import json_bytes
from agent_runtime.recording.store import Store
from rollout_api.records import ObservationsRecord, Outcome, PluginReport, Record, StopReason
from rolloutctl.commands.report import write_report
from rolloutctl.viewer.library import Library, OpenRun
from rolloutctl.viewer.rollout import Rollout
from rolloutctl.viewer.server import serving
from tests.support.made_up_runs import HOSTILE, made_up_rollout, write_bare_run, write_rollout, write_run
from tests.support.own_environment import own_environment

Browser = Callable[[Path | str], AbstractAsyncContextManager[Any]]

EXPRESSIONS = [
    'reward < 0.5 and tag == "hard"',
    "not (reward < 0.5)",
    "ended == MaxTurns or outcome != Completed",
    '"parser" in task and member >= 4',
    "PARSER passed == true",
    "reward == none",
    "dropped > 0",
    'tag != "hard" seconds > 20',
    '"node" in message',
]
ROWS = (
    "JSON.stringify([...document.querySelectorAll('.virtual tbody tr:not(.space) td:first-child')]"
    ".map((e) => Number(e.textContent)))"
)
IMAGES = Path(__file__).parents[3] / "docs" / "images"


@contextlib.asynccontextmanager
async def served(output: Path) -> AsyncIterator[str]:
    """The URL of a viewer of these runs."""
    async with serving(Library(Store.open(str(output), {})), host="127.0.0.1", port=0, token="t0ken") as url:
        yield url


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: with hostile text, a later one of the same tasks that stopped, and one that did not start."""
    output = tmp_path_factory.mktemp("runs")
    write_run(output, "night-run", [made_up_rollout(index) for index in range(48)])
    better = [made_up_rollout(index, hostile=False) for index in range(40)]
    write_run(output, "second", list(map(_better, better)), created=1_760_000_100.0, total=64, finished=False)
    write_run(output, "broken", [], created=1_760_000_200.0, total=8, finished=False, aborted="half of it was lost")
    return output


def _better(rollout: Rollout) -> Rollout:
    result = rollout.result
    assert result is not None
    reward = None if result.reward is None else min(1.0, result.reward + 0.2)
    changed = result.model_copy(update={"reward": reward, "batch": f"step-{result.group}"})
    return Rollout(rollout.records, changed, rollout.verdict)


def folder_of(runs: Path, name: str) -> str:
    return next(path.name for path in runs.iterdir() if path.name.startswith(name))


async def filtered(tab: Any, expression: str) -> list[int]:
    """The rollouts that the table shows for a filter."""
    await tab.until("document.querySelector('.virtual') !== null")
    await tab.run(
        "{ const e = document.querySelector('#filter'); e.value = "
        + json.dumps(expression)
        + "; e.dispatchEvent(new Event('input', {bubbles: true})); e.form.requestSubmit(); }"
    )
    want = json.dumps(expression)
    await tab.until(f"new URLSearchParams(location.hash.split('?')[1]).get('where') === {want}")
    await tab.until(f"!document.querySelector('.wrong') && document.querySelector('.virtual').dataset.where === {want}")
    found: list[int] = json.loads(await tab.run(ROWS))
    return found


async def test_all_runs_are_listed_and_two_can_be_compared(browser: Browser, runs: Path) -> None:
    async with served(runs) as url, browser(url) as tab:
        await tab.until("document.querySelectorAll('#runs tbody tr').length === 3")
        states = await tab.run("[...document.querySelectorAll('#runs .state')].map((e) => e.textContent).join()")
        assert states == "failed to start,unfinished,finished"
        for name in ("night-run", "second"):
            await tab.run(f"document.querySelector('input[aria-label^=\"Compare {name}\"]').click()")
        await tab.until("document.querySelector('a.button') !== null")
        await tab.run("document.querySelector('a.button').click()")
        await tab.until("document.querySelectorAll('#tasks tbody tr').length > 0")
        text = await tab.run("document.querySelector('main').textContent")
        assert "95 % interval" in text
        assert "Worse0" in text
        await tab.run("[...document.querySelectorAll('.tabs button')].find((e) => e.textContent === 'worse').click()")
        await tab.until("document.querySelector('main').textContent.includes('No task.')")
        await tab.run("[...document.querySelectorAll('.tabs button')].find((e) => e.textContent === 'all').click()")
        await tab.until("document.querySelectorAll('#tasks tbody tr').length > 1")
        night = folder_of(runs, "night-run")
        await tab.run(f"location.hash = '/compare/{night}/{night}'")
        await tab.until("document.querySelector('.tiles').textContent.includes('all tasks are equal')")
        assert tab.problems == []
        assert all(request.startswith(url) for request in tab.requests)


async def test_filters_give_the_same_rollouts_in_the_viewer_and_in_the_report(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    run = OpenRun(await Library(Store.open(str(runs), {})).folder(folder_of(runs, "night-run")))
    async with contextlib.aclosing(run):
        await write_report(run, file)
    async with served(runs) as url, browser(f"{url}#/run/{folder_of(runs, 'night-run')}") as tab:
        shown = [await filtered(tab, expression) for expression in EXPRESSIONS]
        cheats = len(await filtered(tab, "dropped > 0"))
        for marked in (".virtual .badge", "#groups .cell"):
            texts = await tab.run(f"[...document.querySelectorAll('{marked}')].map((e) => e.textContent).join()")
            assert (texts.count("cheat?") or texts.count("⚑")) == cheats
        assert tab.problems == []
        await tab.run(f"location.hash = '/run/{folder_of(runs, 'night-run')}?where=rewrad%20%3C%201'")
        await tab.until("document.querySelector('.wrong').textContent.startsWith('rewrad is not a field')")
    async with browser(file) as tab:
        assert [await filtered(tab, expression) for expression in EXPRESSIONS] == shown
        assert tab.requests == [file.resolve().as_uri()], "a report asks for nothing"
        assert tab.problems == []
    results = [made_up_rollout(index).result for index in range(48)]
    assert shown[5] == [result.index for result in results if result and result.reward is None]
    assert shown[6] == [result.index for result in results if result and result.dropped]
    assert all(shown), "each expression finds something"


async def test_a_rollout_is_read_with_the_keyboard(browser: Browser, runs: Path) -> None:
    night = folder_of(runs, "night-run")
    async with served(runs) as url, browser(f"{url}#/run/{night}/rollout/5?where=%22cache%22%20in%20task") as tab:
        await tab.until("document.querySelectorAll('.step').length > 4")
        await tab.until("document.querySelectorAll('.step .copy').length > 0")  # when the run's summary is there too
        await tab.press("e")
        await tab.until("document.activeElement.matches('.step:has(.badge.bad)')")
        await tab.press("n")
        await tab.until("document.activeElement.classList.contains('role-assistant')")
        await tab.press("v")
        await tab.until("document.querySelector('section[aria-label=Verdict]') !== null")
        await tab.press("/")
        assert await tab.run("document.activeElement.id") == "filter"
        await tab.run("document.activeElement.blur()")
        await tab.press("j")
        # The next one of the filtered list; member 5 is not of the task `cache`.
        await tab.press("u")
        await tab.until("location.hash.includes('/run/') && document.querySelectorAll('.virtual tbody tr').length > 0")
        assert "where=" in await tab.run("location.hash")
        await tab.run("document.querySelector('.virtual tbody a').click()")
        await tab.until("document.querySelector('h1').textContent.startsWith('Rollout 8:')")
        await tab.press("j")
        await tab.until("document.querySelector('h1').textContent.startsWith('Rollout 9:')")
        await tab.press("k")
        await tab.until("document.querySelector('h1').textContent.startsWith('Rollout 8:')")
        assert tab.problems == []


async def test_a_rollout_has_raw_calls_tokens_files_and_its_search(browser: Browser, runs: Path) -> None:
    night = folder_of(runs, "night-run")
    page = f"/run/{night}/rollout/3"
    async with served(runs) as url, browser(f"{url}#{page}") as tab:
        await tab.until("document.querySelectorAll('.step').length > 4")
        await tab.until("document.querySelectorAll('.step .copy').length > 0")  # when the run's summary is there too
        copied = await tab.run("[...document.querySelectorAll('.step .copy')].map((e) => e.title).join()")
        turns = [int(turn) for turn in re.findall(r"index: 3, turn: (\d),", copied)]
        assert turns == [0, 1, 2], "the last of its 4 answers has no turn to continue with"
        await tab.run("[...document.querySelectorAll('button')].find((e) => e.textContent === 'raw').click()")
        await tab.until("document.querySelector('main').textContent.includes('\"finishReason\"')")
        await tab.run(
            "{ const e = document.querySelector('#filter'); e.value = 'Needle-3'; "
            "e.dispatchEvent(new Event('input', {bubbles: true})); }"
        )
        await tab.until("document.querySelectorAll('mark').length === 4")
        await tab.run(f"location.hash = '{page}?tab=tokens'")
        await tab.until("document.querySelectorAll('.token').length === 3")
        assert "logprob -2.5" in await tab.run("document.querySelectorAll('.token')[1].title")
        assert "policy 3" in await tab.run("document.querySelector('.sampled').textContent")
        await tab.run(f"location.hash = '{page}?tab=files&file=src/module.py'")
        await tab.until("document.querySelector('.steps').textContent.includes('-    return x + 1')")
        assert "changed" in await tab.run("document.querySelector('.outline').textContent")
        await tab.run(f"location.hash = '{page}?tab=files&file=data.bin'")
        await tab.until("document.querySelector('.steps').textContent.includes('not text')")
        assert tab.problems == []


async def test_compared_rollouts_are_chosen_by_run_and_task_or_by_number(browser: Browser, runs: Path) -> None:
    night, second = folder_of(runs, "night-run"), folder_of(runs, "second")
    async with served(runs) as url, browser(f"{url}#/run/{night}/rollout/3") as tab:
        await tab.until("document.querySelector('a[href*=compare]')")
        await tab.run("document.querySelector('a[href*=compare]').click()")
        await tab.until("document.querySelectorAll('form[aria-label=\"Right rollout\"] option').length > 9")
        assert await tab.run("location.hash") == f"#/compare/{night}/3/{night}/2"

        async def choose(position: int, value: str) -> None:
            select = f"document.querySelectorAll('form[aria-label=\"Right rollout\"] select')[{position}]"
            await tab.until(f"[...{select}.options].some((e) => e.value === {value!r})")
            await tab.run(
                f"{{ const e = {select}; e.value = {value!r}; "
                "e.dispatchEvent(new Event('change', {bubbles: true})); }"
            )

        await choose(0, second)
        await choose(1, "5")
        await tab.until(f"location.hash === '#/compare/{night}/3/{second}/5'")
        await tab.until("document.querySelector('.pair-head').textContent.includes('Rollout 5 fix-parser-0/5')")
        await tab.run(
            "{ const e = document.querySelector('form[aria-label=\"Left rollout\"]'); "
            "e.elements.index.value = 12; e.requestSubmit(); }"
        )
        await tab.until(f"location.hash === '#/compare/{night}/12/{second}/5'")
        await tab.until("document.querySelector('.pair-head').textContent.includes('Rollout 12 fix-cache-1/4')")
        assert tab.problems == []


def _raising(record: Record, traceback: str) -> Record:
    """Return the record of a tool's results, each with a traceback of its own; other records as they are."""
    if not isinstance(record, ObservationsRecord):
        return record
    update = {"traceback": traceback.format(f"turn_{record.turn}")}
    return record.model_copy(update={"results": [result.model_copy(update=update) for result in record.results]})


async def test_tracebacks_are_below_the_causes_and_with_calls_and_plugins(browser: Browser, tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "own.py", line 3, in {}\nValueError: no'
    changes: list[dict[str, Any]] = [
        {"stop_reason": StopReason.AGENT_ERROR, "traceback": raised.format("act")},
        {"tool_tracebacks": {"own": raised.format("search")}},
        {"plugins": {"own:Judge": PluginReport(failed=1, error="after: ValueError", traceback=raised.format("judge"))}},
    ]
    rollouts = []
    for index, changed in enumerate(changes):
        rollout = made_up_rollout(index, hostile=False)
        assert rollout.result is not None
        result = rollout.result.model_copy(update={"outcome": Outcome.COMPLETED, **changed})
        records = [_raising(record, raised) if index == 1 else record for record in rollout.records]
        rollouts.append(Rollout(records, result, rollout.verdict))
    folder = write_run(tmp_path, "raised", rollouts)
    report = tmp_path / "report.html"
    run = OpenRun(await Library(Store.open(str(tmp_path), {})).folder(folder.name))
    async with contextlib.aclosing(run):
        await write_report(run, report)
    async with served(tmp_path) as url:
        for page in (f"{url}#/run/{folder.name}", report):
            async with browser(page) as tab:
                await tab.until("document.querySelectorAll('.causes details').length === 3")
                await tab.run("document.querySelectorAll('.causes summary').forEach((e) => e.click())")
                for place in ("act", "search", "judge"):
                    await tab.until(f"document.querySelector('.causes').textContent.includes('line 3, in {place}\\n')")
        async with browser(f"{url}#/run/{folder.name}/rollout/2?tab=verdict") as tab:
            await tab.until("document.querySelector('.error pre')?.textContent.includes('line 3, in judge\\n')")
            for page in (f"/run/{folder.name}/rollout/1", f"/compare/{folder.name}/0/{folder.name}/1"):
                await tab.run(f"location.hash = '{page}'")
                for turn in range(4):
                    await tab.until(f"document.querySelector('main').textContent.includes('line 3, in turn_{turn}\\n')")


async def test_nothing_that_a_model_wrote_runs_becomes_markup_or_leaves(browser: Browser, runs: Path) -> None:
    night = folder_of(runs, "night-run")
    async with served(runs) as url, browser(f"{url}#/run/{night}") as tab:
        await tab.until("document.querySelectorAll('.virtual tbody tr').length > 10")
        for index in range(len(HOSTILE)):
            await tab.run(f"location.hash = '/run/{night}/rollout/{index}'")
            await tab.until(f"document.querySelector('h1').textContent.startsWith('Rollout {index}:')")
            await tab.until("document.querySelectorAll('.step').length > 4")
            shown = await tab.run("document.querySelector('.steps').textContent")
            assert "Step 1: I look at it." in shown
        assert await tab.run("typeof window.hacked") == "undefined"
        assert await tab.run("document.querySelectorAll('main img, main iframe, main script, main style').length") == 0
        assert await tab.run("[...document.scripts].length") == 1
        # Links of models: only web addresses, and they ask first.
        assert await tab.run("[...document.querySelectorAll('.steps a')].every((a) => /^https?:/.test(a.href))")
        await tab.run("window.confirm = (text) => { window.asked = text; return false; }")
        await tab.run(f"location.hash = '/run/{night}/rollout/3'")
        await tab.until("document.querySelector('.steps a[target=_blank]') !== null")
        await tab.run("document.querySelector('.steps a[target=_blank]').click()")
        assert "https://evil.example/?q=secret" in await tab.run("window.asked")
        # Even markup would not run.
        await tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 4\">')")
        await tab.run(
            "{ const s = document.createElement('script'); s.textContent = 'hacked = 5'; document.body.append(s); }"
        )
        assert await tab.run("typeof window.hacked") == "undefined"
        assert any("Content Security Policy" in problem for problem in tab.problems)
        assert all(request.startswith(url) for request in tab.requests)


async def test_a_live_run_is_followed(browser: Browser, tmp_path: Path) -> None:
    rollouts = [made_up_rollout(index, hostile=False) for index in range(4)]
    folder = write_run(tmp_path, "live", rollouts[:1], group_size=4, finished=False, total=4)
    (folder / "health").mkdir()
    health = folder / "health" / "0.json"
    report = HealthReport(
        time=time.time() + 600,
        call_retries=3,
        rate_limited_calls=2,
        sandboxes={"Ready": 2, "Starting": 1},
        sandbox_problem="1 sandbox does not start: ImagePullBackOff: no tag",
    )
    health.write_bytes(json_bytes(report))
    async with served(tmp_path) as url, browser(f"{url}#/run/{folder.name}") as tab:
        await tab.until("document.querySelectorAll('.virtual tbody tr').length === 1")
        shown = await tab.run("document.querySelector('[aria-label=Health]').textContent")
        assert shown.startswith("1 sandbox does not start: ImagePullBackOff: no tag")
        assert "3 model calls retried, 2 of them because of status 429. Sandboxes: 2 ready, 1 starting. " in shown
        write_rollout(folder, Rollout(rollouts[1].records[:4]))
        await tab.until("document.querySelector('.flight')?.textContent.includes('turn 1')")
        await tab.run(f"location.hash = '/run/{folder.name}/rollout/1'")
        await tab.until("document.querySelector('main').textContent.includes('in flight')")
        write_rollout(folder, Rollout(rollouts[2].records[:3]))
        await tab.run(f"location.hash = '/run/{folder.name}'")
        await tab.until("document.querySelector('.flight')?.textContent.includes('tool bash')")
        await tab.run(f"location.hash = '/run/{folder.name}/rollout/2'")
        await tab.until("document.querySelector('h1').textContent === 'Rollout 2: fix-parser-0, member 2'")
        await tab.until("document.querySelector('.call').textContent.includes('Running for')")
        health.write_bytes(json_bytes(HealthReport(time=time.time(), ended=True)))
        await tab.until("document.querySelector('.banner').textContent.includes('was interrupted')")
        await tab.until("document.querySelector('.call').textContent.includes('No result was recorded.')")
        assert "New steps" not in await tab.run("document.querySelector('main').textContent")
        await tab.run(f"location.hash = '/run/{folder.name}'")
        for index in (3,):
            write_rollout(folder, rollouts[index])
        await tab.until("document.querySelectorAll('.virtual tbody tr').length === 2")
        assert tab.problems == []


class Proxy:
    """A proxy in front of a viewer, as an ingress is. `refusal`: its own answer to every request, while it is set."""

    def __init__(self, target: str) -> None:
        self.refusal: Callable[[], web.Response] | None = None
        self._target = target
        self._streams: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """End all answers that are being sent."""
        for stream in self._streams:
            stream.cancel()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; yields the URL."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            self.cut()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return self.refusal()
        url = self._target + request.path_qs.removeprefix("/")
        async with aiohttp.ClientSession() as http, http.get(url, timeout=aiohttp.ClientTimeout(None)) as answer:
            headers = {name: answer.headers[name] for name in ("Content-Type", "Content-Security-Policy")}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            stream = asyncio.create_task(self._copy(answer, response))
            self._streams.add(stream)
            await asyncio.wait([stream])
            self._streams.discard(stream)
            if stream.cancelled() and request.transport is not None:
                request.transport.abort()
        return response

    async def _copy(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        async for part in answer.content.iter_any():
            await response.write(part)
        await response.write_eof()


REFUSALS: dict[str, tuple[Callable[[], web.Response], str]] = {
    "restart": (lambda: web.Response(status=502, text="<html>Bad Gateway</html>"), "answers 502 Bad Gateway"),
    "login": (
        lambda: web.Response(status=302, headers={"Location": "https://login.example/"}),
        "login may have expired",
    ),
    "unauthorized": (lambda: web.Response(status=401, text="<html>Sign in</html>"), "login may have expired"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_live_run_is_followed_again_after_a_proxy_refused(browser: Browser, tmp_path: Path, name: str) -> None:
    refusal, words = REFUSALS[name]
    rollouts = [made_up_rollout(index, hostile=False) for index in range(4)]
    folder = write_run(tmp_path, "live", rollouts[:1], group_size=4, finished=False, total=4)
    async with served(tmp_path) as target:
        proxy = Proxy(target)
        async with proxy.serving() as url, browser(f"{url}#/run/{folder.name}") as tab:
            await tab.until("document.querySelectorAll('.virtual tbody tr').length === 1")
            proxy.cut()
            write_rollout(folder, rollouts[1])
            await tab.until("document.querySelectorAll('.virtual tbody tr').length === 2")
            proxy.refusal = refusal
            proxy.cut()
            await tab.until(f"document.querySelector('main').textContent.includes({words!r})")
            proxy.refusal = None
            write_rollout(folder, rollouts[2])
            await tab.until("document.querySelectorAll('.virtual tbody tr').length === 3")


async def test_a_damaged_object_is_told_and_the_rest_works(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "hurt", [made_up_rollout(index, hostile=False) for index in range(16)])
    chunk = folder / "attempts" / "3" / "0" / "1-1-records.jsonl.zst"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    (folder / "seals" / "5.json").write_text("{")
    async with served(tmp_path) as url, browser(f"{url}#/run/{folder.name}") as tab:
        await tab.until("document.querySelectorAll('.virtual tbody tr').length === 15")
        assert "Rollout 5 cannot be read" in await tab.run("document.querySelector('.head').textContent")
        await tab.run(f"location.hash = '/run/{folder.name}/rollout/3'")
        await tab.until("document.querySelector('.problem')?.textContent.includes('1-1-records.jsonl.zst')")
        await tab.run(f"location.hash = '/run/{folder.name}/rollout/4'")
        await tab.until("document.querySelectorAll('.step').length > 4")


async def test_pages_can_be_used_by_everybody(browser: Browser, runs: Path) -> None:
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    check = """axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}).then((found) => JSON.stringify(
        found.violations.map((v) => [v.id, v.nodes.slice(0, 3).map((n) => n.html + ' ' + n.failureSummary)])))"""
    async with served(runs) as url, browser(url) as tab:
        await tab.call("Page.setBypassCSP", enabled=True)  # the checker's own script is inline
        for path, ready in pages(runs):
            for scheme in ("light", "dark"):
                await tab.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                )
                await tab.run(f"location.hash = '{path}'")
                await tab.until(ready)
                await tab.run(axe)
                assert json.loads(await tab.run(check)) == [], f"{path}, {scheme}"
            for width in (420, 3840):
                await tab.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
                )
                await tab.until("document.documentElement.scrollWidth <= innerWidth")
            await tab.call("Emulation.clearDeviceMetricsOverride")


def pages(runs: Path, run: str | None = None) -> Sequence[tuple[str, str]]:
    """Return each page, and a condition that it is drawn. `run` is the only run if there is one."""
    night, second = run or folder_of(runs, "night-run"), run or folder_of(runs, "second")
    return [
        ("/runs", "document.querySelectorAll('#runs tbody tr').length === 3"),
        (f"/run/{night}", "document.querySelectorAll('.virtual tbody tr').length > 10"),
        (f"/run/{second}", "document.querySelectorAll('.curve circle').length > 2"),
        (f"/run/{night}/rollout/5", "document.querySelectorAll('.step').length > 4"),
        (f"/run/{night}/rollout/5?tab=verdict", "document.querySelector('section[aria-label=Verdict] pre') !== null"),
        (f"/run/{night}/rollout/5?tab=files&file=src/module.py", "document.querySelector('.steps pre') !== null"),
        (f"/run/{night}/rollout/5?tab=tokens", "document.querySelectorAll('.token').length === 3"),
        (f"/compare/{night}/{second}", "document.querySelectorAll('#tasks tbody tr').length > 0"),
        (f"/compare/{night}/3/{night}/4", "document.querySelectorAll('section.pair').length > 4"),
    ]


@pytest.mark.parametrize(("count", "group"), [(2_000, 102), pytest.param(100_000, 6002, marks=pytest.mark.full)])
async def test_a_large_run_is_shown_in_parts(browser: Browser, tmp_path: Path, count: int, group: int) -> None:
    folder = write_bare_run(tmp_path, "large", count)
    async with served(tmp_path) as url, browser(f"{url}#/run/{folder.name}") as tab:
        await tab.until("document.querySelectorAll('.virtual tbody tr').length > 10")
        await tab.until(f"document.querySelector('.virtual table').getAttribute('aria-rowcount') === '{count + 1}'")
        assert await tab.run("document.querySelectorAll('.virtual tbody tr').length") < 100, "only those in sight"
        await tab.run(f"document.querySelector('.virtual').scrollTop = 34 * {count * 9 // 10}")
        await tab.until(
            "[...document.querySelectorAll('.virtual td:first-child')]"
            f".some((e) => e.textContent === '{count * 9 // 10 + 5}')"
        )
        assert (await filtered(tab, f"fix-dates-{group}"))[0] == 8 * group
        await tab.run(f"location.hash = '/run/{folder.name}/rollout/3'")
        await tab.until("document.querySelectorAll('.step').length > 4")
        assert tab.problems == []


@pytest.mark.full
async def test_screenshots_of_every_page(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ROLLOUT_GOLDEN=write they are those of the documentation."""
    images = IMAGES if os.environ.get("ROLLOUT_GOLDEN") == "write" else tmp_path
    monkeypatch.chdir(tmp_path)  # pages show where the runs are
    output, now = Path("out"), time.time()
    plain = [made_up_rollout(index, hostile=False, began=now - 900) for index in range(48)]
    model = {
        "endpoint": {"baseURL": "http://127.0.0.1:8000/v1", "name": "Qwen3-8B"},
        "prices": {"prompt": 2, "completion": 8},
    }
    write_run(output, "night-run", plain, created=now - 900, model=model)
    recent = [made_up_rollout(index, hostile=False, began=now - 80) for index in range(40)]
    live = write_run(
        output, "second", list(map(_better, recent)), created=now - 80, total=64, finished=False, model=model
    )
    for index, records in ((40, 2), (41, 3), (42, 4), (43, 1)):
        write_rollout(live, Rollout(made_up_rollout(index, hostile=False, began=now - 50).records[:records]))
    problem = "RateLimited: status 429: rate limit reached"
    report = HealthReport(
        time=now + 600,
        call_retries=3,
        rate_limited_calls=2,
        failing_calls=1,
        call_problem=problem,
        sandboxes={"Ready": 4},
    )
    (live / "health").mkdir()
    (live / "health" / "0.json").write_bytes(json_bytes(report))
    write_run(
        output, "broken", [], created=now - 20, total=8, finished=False, aborted="half of it was lost", model=model
    )
    names = ["runs", "run", "live", "rollout", "verdict", "files", "tokens", "compare-runs", "compare-rollouts"]
    async with served(output) as url, browser(url) as tab:
        for name, (path, ready) in zip(names, pages(output), strict=True):
            for suffix, width, scheme in (("", 1280, "light"), ("-dark", 1280, "dark"), ("-420", 420, "light")):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await tab.call("Emulation.setDeviceMetricsOverride", **size)
                await tab.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                )
                await tab.run(f"location.hash = '{path}'")
                await tab.until(ready)
                picture = await tab.call("Page.captureScreenshot", format="png")
                (images / f"viewer-{name}{suffix}.png").write_bytes(base64.b64decode(picture["data"]))
    assert len(list(images.glob("viewer-*.png"))) >= 27


JOIN = """
import sys
from pathlib import Path
from PIL import Image
target, *frames = sys.argv[1:]
# One palette for all frames, of the one with the most colours, so that still parts stay equal and take no space.
images = [Image.open(path).convert("RGB") for path in frames]
palette = max(images, key=lambda image: len(image.getcolors(1 << 24))).quantize(128, dither=Image.Dither.NONE)
drawn = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
seconds = [float(Path(path).stem.split("-")[1]) for path in frames]
durations = [round(1000 * value) for value in seconds]
drawn[0].save(target, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True)
"""


@pytest.mark.full
async def test_moving_picture_of_the_viewer(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run, a filter, and a rollout. With ROLLOUT_GOLDEN=write it is that of README.md."""
    python = own_environment("pillow", "pillow==12.0.0") / "bin" / "python"
    target = (IMAGES if os.environ.get("ROLLOUT_GOLDEN") == "write" else tmp_path) / "viewer.gif"
    monkeypatch.chdir(tmp_path)
    output, now = Path("out"), time.time()
    model = {"endpoint": {"baseURL": "http://127.0.0.1:8000/v1", "name": "Qwen3-8B"}}
    rollouts = [made_up_rollout(index, hostile=False, began=now - 60) for index in range(64)]
    live = write_run(output, "night-run", rollouts[:8], created=now - 60, total=64, finished=False, model=model)
    (live / "health").mkdir()
    (live / "health" / "0.json").write_bytes(json_bytes(HealthReport(time=now + 600)))
    frames: list[Path] = []
    async with served(output) as url, browser(f"{url}#/run/{live.name}") as tab:
        await tab.call("Emulation.setDeviceMetricsOverride", width=1120, height=680, deviceScaleFactor=1, mobile=False)

        async def picture(seconds: float) -> None:
            data = await tab.call("Page.captureScreenshot", format="png")
            frames.append(tmp_path / f"{len(frames):02}-{seconds}.png")
            frames[-1].write_bytes(base64.b64decode(data["data"]))

        for sealed in range(8, 57, 8):
            for index in range(sealed - 8, min(sealed + 4, 64)):
                whole = rollouts[index]
                is_sealed = index < sealed
                shutil.rmtree(live / "attempts" / str(index), ignore_errors=True)
                write_rollout(live, whole if is_sealed else Rollout(whole.records[: 1 + (index + sealed) % 5]))
            await tab.until(f"document.querySelector('progress').value === {sealed}")
            await picture(0.8)
        for expression in ("reward < 0.5", "reward < 0.5 and tools > 2"):
            await filtered(tab, expression)
            await tab.run("document.querySelector('#filter').scrollIntoView()")
            await picture(1.6)
        for path, ready in pages(output, run=live.name)[3:6]:
            await tab.run(f"location.hash = '{path}'")
            await tab.until(ready)
            await picture(2.4)
    await asyncio.to_thread(subprocess.check_call, [python, "-c", JOIN, target, *frames])
    assert len(frames) == 12
    assert target.stat().st_size < 1_500_000

"""The report in a real browser: it must be readable offline, searchable, and deaf to what models wrote into it."""

import importlib.util
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rolloutctl.ui import page

_samples = importlib.util.spec_from_file_location(
    "samples", Path(__file__).parents[2] / "unit" / "rolloutctl" / "conftest.py"
)
assert _samples is not None
assert _samples.loader is not None
samples = importlib.util.module_from_spec(_samples)
_samples.loader.exec_module(samples)

GROUP_SIZE = 8
Browser = Callable[[Path], AbstractAsyncContextManager[Any]]


def write_report(file: Path, count: int, **changes: Any) -> list[page.Rollout]:
    rollouts = [samples.made_up_rollout(index, GROUP_SIZE) for index in range(count)]
    facts: dict[str, Any] = {
        "name": "night-run",
        "location": "out/night-run-1",
        "mode": "Train",
        "model": "</title><script>window.hacked = 3</script>",
        "agent": "ToolCalling",
        "group_size": GROUP_SIZE,
        "total": count,
    }
    groups = [rollouts[start : start + GROUP_SIZE] for start in range(0, count, GROUP_SIZE)]
    head = page.head(page.JobFacts(**facts | changes), [rollout.result for rollout in rollouts])
    file.write_text(head + "".join(map(page.group, groups)) + page.tail(), encoding="utf-8")
    return rollouts


@pytest.fixture
def report(tmp_path: Path) -> tuple[Path, list[page.Rollout]]:
    file = tmp_path / "report.html"
    return file, write_report(file, 48)


async def test_it_loads_without_errors_and_asks_for_nothing_else(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    file, rollouts = report
    async with browser(file) as tab:
        assert await tab.run("document.querySelectorAll('#list tbody tr').length") == len(rollouts)
        assert await tab.run("document.querySelectorAll('#groups tbody tr').length") == len(rollouts) // GROUP_SIZE
        assert tab.requests == [file.resolve().as_uri()]
        assert tab.problems == []


async def test_what_was_submitted_step_by_step_is_a_learning_curve(browser: Browser, tmp_path: Path) -> None:
    rollouts = [samples.made_up_rollout(index, GROUP_SIZE) for index in range(48)]
    labelled = [r.result.model_copy(update={"batch": f"step-{r.result.group // 2}", "reward": 0.5}) for r in rollouts]
    facts = page.JobFacts("curve", "out/curve", "Train", "m", "Environment", GROUP_SIZE, 48)
    file = tmp_path / "curve.html"
    file.write_text(page.head(facts, labelled) + page.tail(), encoding="utf-8")
    async with browser(file) as tab:
        assert await tab.run("document.querySelectorAll('#curve circle').length") == 3
        said = await tab.run("document.querySelector('#curve svg').getAttribute('aria-label')")
        assert said == "Mean reward by label: step-0: 0.5, step-1: 0.5, step-2: 0.5"
        assert tab.problems == []


async def test_nothing_that_a_model_wrote_runs_or_becomes_markup(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    file, _ = report
    async with browser(file) as tab:
        for index in range(len(samples.HOSTILE)):
            await tab.run(f"location.hash = '#rollout-{index}'")
            await tab.until(f"document.querySelector('#reader-title').textContent.startsWith('#{index} ')")
            await tab.until(f"document.querySelector('#transcript').textContent.includes('needle-{index}')")
            assert await tab.run("document.querySelectorAll('#transcript .step').length") > 3
        assert await tab.run("typeof window.hacked") == "undefined"
        assert await tab.run("document.querySelectorAll('img').length") == 0
        assert await tab.run("[...document.scripts].filter((s) => !s.type).length") == 1
        assert tab.problems == []
        assert tab.requests == [file.resolve().as_uri()]


async def test_injected_script_would_not_run_even_if_it_became_markup(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    async with browser(report[0]) as tab:
        await tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 4\">')")
        await tab.run(
            "{ const s = document.createElement('script'); s.textContent = 'hacked = 5'; document.body.append(s); }"
        )
        await tab.until("true")
        assert await tab.run("typeof window.hacked") == "undefined"
        assert any("Content Security Policy" in problem for problem in tab.problems)


async def test_search_and_filters_find_exactly_what_fits(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    file, rollouts = report
    rows = "JSON.stringify([...$('list').tBodies[0].rows].map((row) => Number(row.cells[0].textContent)))"
    results = [rollout.result for rollout in rollouts]
    async with browser(file) as tab:

        async def shown(script: str, condition: str) -> list[int]:
            await tab.run("document.querySelector('#filters').reset()")
            await tab.run(script)
            await tab.until(condition)
            indices: list[int] = json.loads(await tab.run(rows))
            return indices

        def type_in(text: str) -> str:
            return f"$('query').value = {text!r}; filter()"

        def counted(number: int) -> str:
            return f"$('count').textContent.startsWith('{number} of')"

        parser = [r.index for r in results if "parser" in r.task]
        assert await shown(type_in("PARSER"), counted(len(parser))) == parser
        one_group = [r.index for r in results if r.task == "fix-cache-1"]
        assert await shown(type_in("task:fix-cache-1"), counted(8)) == one_group
        turned = [r.index for r in results if r.stop_reason is not None and r.stop_reason.value == "MaxTurns"]
        script = "$('ended').value = 'MaxTurns'; filter()"
        assert await shown(script, counted(len(turned))) == turned
        passed = [r.index for r in results if r.passed]
        assert await shown("$('reward').value = 'passed'; filter()", counted(len(passed))) == passed
        masked = [r.index for r in results if r.reward is None]
        assert await shown("$('reward').value = 'none'; filter()", counted(len(masked))) == masked
        assert await shown(type_in("needle-17"), counted(0)) == []
        assert await shown("$('deep').checked = true; " + type_in("needle-17"), counted(1)) == [17]
        assert tab.problems == []


async def test_it_can_be_read_with_the_keyboard_alone(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    async with browser(report[0]) as tab:
        await tab.press("/")
        assert await tab.run("document.activeElement.id") == "query"
        await tab.run("document.querySelector('#list tbody a').focus()")
        await tab.run("document.activeElement.click()")
        await tab.until("$('reader').open && $('reader-title').textContent.startsWith('#0 ')")
        await tab.press("j")
        await tab.until("$('reader-title').textContent.startsWith('#1 ')")
        await tab.press("k")
        await tab.until("$('reader-title').textContent.startsWith('#0 ')")
        await tab.run("$('close').click()")
        await tab.until("!$('reader').open && location.hash === ''")
        assert await tab.run("document.activeElement.getAttribute('href')") == "#rollout-0"


async def test_every_control_has_a_name_and_text_can_be_read_in_light_and_dark(
    browser: Browser, report: tuple[Path, list[page.Rollout]]
) -> None:
    # WCAG 2.2: 4.5:1 for text. The squares and badges are measured as drawn, mixed colours included.
    contrast = """
    (() => {
      const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
      };
      const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = (color) => {
        const [r, g, b] = rgba(color).map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const ground = (element) => {
        for (let e = element; e; e = e.parentElement) {
          const color = getComputedStyle(e).backgroundColor;
          if (rgba(color)[3] > 250) return color;
        }
        return 'white';
      };
      const looked = ['h1', '#about', '#figures small', '#figures dd', '.member:not(.masked)', '#list td', 'thead th',
                      'a:not(.skip)', '.hint', '.tag'];
      const worst = {};
      for (const selector of looked) for (const element of document.querySelectorAll(selector)) {
        const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        worst[selector] = Math.min(worst[selector] ?? 99, ratio);
      }
      return JSON.stringify(worst);
    })()"""
    nameless = """[...document.querySelectorAll('a, button, input, select')]
        .filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length)))
        .map((e) => e.outerHTML)"""
    async with browser(report[0]) as tab:
        for scheme in ("light", "dark"):
            await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            worst = json.loads(await tab.run(contrast))
            assert len(worst) == 10, "every one of them is on the page"
            assert {selector: ratio for selector, ratio in worst.items() if ratio < 4.5} == {}, scheme
        assert await tab.run(nameless) == []
        assert await tab.run("document.documentElement.lang") == "en"


@pytest.mark.full
async def test_five_thousand_rollouts_stay_searchable(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "large.html"
    write_report(file, 5000)
    async with browser(file) as tab:
        assert await tab.run("rollouts.length") == 5000
        assert await tab.run("document.querySelectorAll('#list tbody tr').length") == 200, "drawn as they are wanted"
        await tab.run("$('query').value = 'fix-dates-602'; filter()")
        await tab.until("$('count').textContent.startsWith('8 of 5,000')")
        await tab.run("location.hash = '#rollout-4999'")
        await tab.until("$('transcript').textContent.includes('needle-4999')")
        await tab.run("$('reader').close(); $('deep').checked = true; $('query').value = 'needle-4321'; filter()")
        await tab.until("$('count').textContent.startsWith('1 of 5,000')")
        assert tab.problems == []


async def test_an_unfinished_and_an_aborted_run_say_so(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_report(file, 16, total=40)
    async with browser(file) as tab:
        assert "16 of 40" in await tab.run("$('state').textContent")
    write_report(file, 16, aborted="half of it was lost")
    async with browser(file) as tab:
        assert "half of it was lost" in await tab.run("$('state').textContent")

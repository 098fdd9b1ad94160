"""A plugin's failure concerns only itself: it is visible, counted, limited in time, and affects no other plugin."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_rollouts.plugins import Refuse, RolloutInfo
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.hooks import hook
from agent_runtime.plugins.plugins import Answer, Plugins, reports_of
from agent_runtime.plugins.registry import Loaded
from rollout_api.records import PluginCall
from rollout_api.tasks import Task

TASK = Task(name="t", prompt="p")
ROLLOUT = RolloutInfo(0, 0, 0, 0, 0, TASK)
CALL = ToolCall("c", "bash", '{"command": "ls"}')

Opened = Callable[..., Plugins]


@pytest.fixture
async def opened(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opened]:
    """Open plugins of these objects, each named after its class. A call of the first one may take this many seconds."""
    made: list[Plugins] = []

    def open_them(*plugins: object, seconds: float = 30, on_failure: Any = lambda call, key: None) -> Plugins:
        loaded = [
            Loaded(type(plugin).__name__, plugin, 60 if number else seconds) for number, plugin in enumerate(plugins)
        ]
        monkeypatch.setattr("agent_runtime.plugins.plugins.load_plugins", lambda uses, more: loaded)
        made.append(Plugins.open([], plugins, on_failure))
        return made[-1]

    yield open_them
    for plugins in made:
        plugins.close()


async def filtered(plugins: Plugins, call: ToolCall = CALL) -> list[Answer]:
    return [answer async for answer in plugins.ask_on("filter_tool_call", "k", "call", call, rollout=ROLLOUT)]


def recorder(name: str, calls: list[str], method: Callable[..., Any] | None = None) -> object:
    def before_tool_call(self: object, key: str) -> None:
        calls.append(name)

    return type(name, (), {"before_tool_call": method or before_tool_call})()


async def tell(plugins: Plugins) -> list[Answer]:
    return [answer async for answer in plugins.ask("before_tool_call", "k", rollout=ROLLOUT, call=CALL)]


async def test_plugins_run_in_the_manifests_order_or_first_or_last(opened: Opened) -> None:
    calls: list[str] = []

    class First:
        @hook(tryfirst=True)
        def before_tool_call(self) -> None:
            calls.append("first")

    class Last:
        @hook(trylast=True)
        async def before_tool_call(self) -> None:
            calls.append("last")

    await tell(opened(Last(), recorder("A", calls), recorder("B", calls), First(), recorder("C", calls)))
    assert calls == ["first", "A", "B", "C", "last"]


@pytest.mark.parametrize(
    "error", [KeyError("x"), SystemExit(3), asyncio.CancelledError(), TimeoutError(), KeyboardInterrupt()]
)
async def test_any_error_of_a_plugin_is_recorded_and_the_next_one_is_called(
    opened: Opened, error: BaseException
) -> None:
    def fail(self: object) -> None:
        raise error

    async def fail_later(self: object) -> None:
        await asyncio.sleep(0)
        raise error

    told: list[tuple[PluginCall, str]] = []
    calls: list[str] = []
    plugins = opened(
        recorder("Fails", [], fail), recorder("Later", [], fail_later), recorder("Fine", calls),
        on_failure=lambda call, key: told.append((call, key)),
    )  # fmt: skip
    answers = await tell(plugins)
    assert [answer.failed for answer in answers] == [True, True, False]
    assert calls == ["Fine"]
    assert [(call.plugin, call.hook, key) for call, key in told] == [
        ("Fails", "before_tool_call", "k"),
        ("Later", "before_tool_call", "k"),
    ]
    assert type(error).__name__ in told[0][0].message
    if not isinstance(error, TimeoutError):  # asyncio raises a new one in another thread
        assert "in fail_later" in str(told[1][0].traceback)
    await tell(plugins)
    assert calls == ["Fine", "Fine"], "and again, since the threads live on"


async def test_plugin_that_blocks_its_thread_delays_no_other(opened: Opened) -> None:
    go_on = threading.Event()

    def block(self: object) -> None:
        go_on.wait(60)

    calls: list[str] = []
    plugins = opened(recorder("Blocks", [], block), recorder("Fine", calls), seconds=0.05)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answers = await tell(plugins)
    assert answers[0].failed
    assert "timeoutSeconds" in answers[0].call.message
    assert ticks, "the event loop went on meanwhile"
    again = await tell(plugins)
    assert "still blocks" in again[0].call.message
    assert calls == ["Fine", "Fine"]
    go_on.set()
    async with asyncio.timeout(60):  # a plugin whose thread is free again is called again
        while (await tell(plugins))[0].failed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ticking.cancel()


async def test_a_plugin_that_awaits_too_long_is_cancelled(opened: Opened) -> None:
    ended = threading.Event()

    async def wait(self: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    (answer,) = await tell(opened(recorder("Waits", [], wait), seconds=0.05))
    assert answer.failed
    assert await asyncio.to_thread(ended.wait, 10)


async def test_cancelled_rollout_cancels_the_running_plugin_call(opened: Opened) -> None:
    started, ended = threading.Event(), threading.Event()

    async def wait(self: object) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    asking = asyncio.create_task(tell(opened(recorder("Waits", [], wait))))
    assert await asyncio.to_thread(started.wait, 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(ended.wait, 10)


async def test_calls_of_many_rollouts_run_side_by_side_where_a_plugin_awaits(opened: Opened) -> None:
    at_once: list[int] = [0, 0]

    async def wait(self: object) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.02)
        at_once[0] -= 1

    plugins = opened(recorder("Waits", [], wait))
    await asyncio.gather(*(tell(plugins) for _ in range(20)))
    assert at_once[1] > 5


async def test_each_filter_gets_the_previous_ones_result_and_none_gets_a_refused_call(opened: Opened) -> None:
    seen: list[str] = []

    class Adds:
        def filter_tool_call(self, call: ToolCall) -> ToolCall:
            return ToolCall(call.id, call.name, '{"command": "ls -l"}')

    class Refuses:
        def filter_tool_call(self, call: ToolCall) -> Refuse:
            seen.append(call.arguments)
            return Refuse("no")

    class Never:
        def filter_tool_call(self, call: ToolCall) -> None:
            seen.append("never")

    answers = await filtered(opened(Adds(), Refuses(), Never()))
    assert [answer.call.did for answer in answers] == ["Changed", "Refused"]
    assert seen == ['{"command": "ls -l"}']


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        ("filter_tool_call", True, "expected Refuse, a ToolCall or None"),
        ("filter_tool_call", ToolCall("other", "bash", "{}"), "id was changed to 'other'"),
        ("modify_task", {"prompt": "x"}, "expected a Task or None"),
        ("modify_task", Task(name="other", prompt="p"), "name was changed to other"),
        ("evaluate_rollout", {"a": float("nan")}, "not a finite number"),
        ("evaluate_rollout", 0.5, "expected scores by name"),
        ("analyze_trajectory", {"a": {1, 2}}, "not JSON serializable"),
        ("analyze_trajectory", {"a": "x" * 70_000}, "the limit is 65536"),
        ("analyze_trajectory", {"a": json.loads("[" * 200 + "]" * 200)}, "nested more than 128 levels"),
        ("should_stop_group", True, "expected a reason or None"),
    ],
)
async def test_invalid_return_value_of_a_plugin_is_a_failure(
    opened: Opened, method: str, value: Any, words: str
) -> None:
    plugins = opened(type("Odd", (), {method: lambda self: value})())
    (answer,) = [answer async for answer in plugins.ask(method, "k", task=TASK, call=CALL)]
    assert answer.failed
    assert answer.value is None
    assert words in answer.call.message


async def test_error_of_a_plugin_that_cannot_be_printed_is_recorded(opened: Opened) -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Odd:
        def before_tool_call(self) -> None:
            raise Wordless

    (answer,) = [answer async for answer in opened(Odd()).ask("before_tool_call", "k")]
    assert "Wordless" in answer.call.message


@pytest.mark.parametrize("reason", [None, 5, ValueError("no")])
async def test_refusal_without_text_refuses_the_call(opened: Opened, reason: Any) -> None:
    class Odd:
        def filter_tool_call(self) -> Refuse:
            return Refuse(reason)

    (answer,) = [answer async for answer in opened(Odd()).ask("filter_tool_call", "k", call=CALL)]
    assert answer.failed
    assert "expected text" in answer.call.message


def test_reports_add_up_the_actions_of_each_plugin_and_keep_the_first_error() -> None:
    calls = [
        PluginCall(plugin="A", hook="filter_tool_call", seconds=0.5, did="Refused", message="no"),
        PluginCall(plugin="B", hook="after_tool_call", seconds=1, did="Failed", message="first"),
        PluginCall(plugin="B", hook="after_rollout", seconds=1, did="Failed", message="second", traceback="of 2"),
        PluginCall(plugin="A", hook="filter_tool_call", seconds=0.25, did="Changed"),
    ]
    reports = reports_of(calls)
    assert (reports["A"].calls, reports["A"].refused, reports["A"].changed, reports["A"].seconds) == (2, 1, 1, 0.75)
    assert (reports["B"].failed, reports["B"].error) == (2, "after_tool_call: first")
    assert reports["B"].traceback == "of 2"


def test_a_hook_that_wraps_the_others_is_refused_when_the_job_starts() -> None:
    class Wraps:
        @hook(wrapper=True)
        def before_tool_call(self) -> Any:
            return (yield)

    with pytest.raises(ExtensionError, match="is a hook wrapper"):
        Plugins.open([], [Wraps()])


def test_a_job_without_plugins_needs_no_pluggy_and_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pluggy", None)
    before = threading.active_count()
    plugins = Plugins.open([])
    assert (plugins.any, plugins.have("before_tool_call"), threading.active_count()) == (False, False, before)

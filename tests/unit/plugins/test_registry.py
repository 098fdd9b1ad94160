"""An unusable plugin is an error before the first rollout, with a message that says what to correct."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from agent_rollouts.plugins import ActionFilter, EpisodeEvaluator
from agent_runtime.extensions import ExtensionError
from agent_runtime.plugins.plugins import Plugins
from agent_runtime.plugins.registry import describe_plugin, hooks_of, load_plugins, registry, unused_hooks
from rollout_api.rollout_job import PluginUse

MODULE = """
class Shouts:
    def after_rollout(self, result):
        print(result.outcome)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with a plugin of three lines, found by its entry point."""
    (tmp_path / "shouting_kit.py").write_text(MODULE)
    metadata = tmp_path / "shouting_kit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting-kit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[agent_rollouts.plugins]\nshouts = shouting_kit:Shouts\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("shouting_kit", None)


@pytest.mark.parametrize("name", ["shouts", "shouting_kit:Shouts"])
def test_small_plugin_is_found_by_entry_point_and_by_module_and_class(package: None, name: str) -> None:
    (loaded,) = load_plugins([PluginUse(name=name)])
    assert loaded.name == name
    assert describe_plugin(name).hooks == ["after_rollout"]
    assert "shouts" in registry.names()


def test_built_ins_have_their_kinds_and_defaults() -> None:
    kinds = {name: describe_plugin(name).kinds for name in ("PerformanceStop", "SafetyFilter", "TrajectoryAnalysis")}
    assert kinds == {
        "PerformanceStop": ["RolloutManager"],
        "SafetyFilter": ["ActionFilter"],
        "TrajectoryAnalysis": ["TrajectoryAnalyzer"],
    }
    options = describe_plugin("PerformanceStop").options["properties"]
    assert {name: option["default"] for name, option in options.items()} == {
        "threshold": 0.8,
        "minEpisodes": 3,
        "maxEpisodes": 10,
    }
    assert all(option["description"] for option in options.values())


class Configured:
    def __init__(self, most_words: Annotated[int, Field(ge=1)], label: str = "x") -> None:
        self.most_words, self.label = most_words, label

    def before_tool_call(self) -> None: ...


def used(plugin: type[Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(registry._registered, plugin.__name__, plugin)
    return load_plugins([PluginUse(name=plugin.__name__, config=config)])[0].plugin


def test_options_are_the_parameters_of_the_class_in_camel_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = used(Configured, {"mostWords": 7}, monkeypatch)
    assert (made.most_words, made.label) == (7, "x")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "config.mostWords: is missing"),
        ({"mostWords": 0}, "config.mostWords: is 0, expected at least 1"),
        ({"mostWords": 1, "lable": "y"}, "config.lable: is not a known field; did you mean label?"),
        ({"most_words": 1}, "config.mostWords: is missing"),
    ],
)
def test_wrong_option_is_reported_with_what_was_expected(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExtensionError, match=words.replace("?", r"\?")):
        used(Configured, config, monkeypatch)


def test_misspelt_hook_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Misspelt:
        def after_rollout(self) -> None: ...
        def before_tol_call(self) -> None: ...

    with pytest.raises(ExtensionError, match=r"no hook before_tol_call; did you mean before_tool_call\?"):
        used(Misspelt, {}, monkeypatch)


def test_unknown_argument_of_a_hook_is_reported() -> None:
    class Greedy:
        def before_tool_call(self, workspace: object) -> None: ...

    allowed = "before_tool_call has no argument 'workspace'; its arguments are rollout, call, key"
    with pytest.raises(ExtensionError, match=allowed):
        Plugins.open([], [Greedy()])
    with pytest.raises(ExtensionError, match=allowed):
        hooks_of(Greedy, "Greedy")


def test_class_without_hooks_or_its_kinds_method_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        def work(self) -> None: ...

    class Unfinished(EpisodeEvaluator):
        """Lacks the method that would make it a plugin."""

    class Broken:
        def __init__(self) -> None:
            raise OSError("no licence")

        def after_rollout(self) -> None: ...

    with pytest.raises(ExtensionError, match="has no hook; expected methods named like before_group"):
        used(Empty, {}, monkeypatch)
    with pytest.raises(ExtensionError, match="lacks evaluate_rollout"):
        used(Unfinished, {}, monkeypatch)
    with pytest.raises(ExtensionError, match=r"creating it failed in .*test_registry.py:\d+ with OSError: no licence"):
        used(Broken, {}, monkeypatch)


def test_two_plugins_of_one_name_are_refused() -> None:
    with pytest.raises(ExtensionError, match="two plugins are named 'Configured'"):
        load_plugins([], [Configured(1), Configured(2)])


def test_hooks_that_a_command_agent_never_calls_are_reported() -> None:
    class Filters(ActionFilter):
        async def filter_tool_call(self, rollout: Any, call: Any) -> None: ...
        def before_tool_call(self) -> None: ...

    (said,) = unused_hooks(load_plugins([], [Filters(), Configured(1)]))
    assert "plugin Filters: filter_tool_call will not be called" in said


def test_without_pluggy_the_error_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agent_runtime.plugins.hooks", raising=False)
    monkeypatch.setitem(sys.modules, "pluggy", None)
    with pytest.raises(ExtensionError, match=r"agent-rollouts\[plugins\]"):
        load_plugins([], [Configured(1)])

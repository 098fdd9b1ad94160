"""The interface of Real Work's `src/plugins/base.py`, and plugins of each of its kinds that record their calls."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel


class ActionType(StrEnum):
    COMMAND = "command"
    FILE_WRITE = "file_write"
    FILE_READ = "file_read"
    DONE = "done"


class Action(BaseModel):
    type: ActionType
    content: str
    timeout: int | None = None
    working_directory: str | None = None
    background: bool = False


class ActionResult(BaseModel):
    success: bool
    output: str = ""
    error: str = ""
    exit_code: int | None = None
    duration: float
    timestamp: str


class TestResult(BaseModel):
    __test__ = False

    command: str
    success: bool
    output: str
    error: str = ""
    exit_code: int
    duration: float
    timestamp: str


class EpisodeResult(BaseModel):
    environment_id: str
    success: bool
    total_actions: int
    duration: float
    test_results: list[TestResult]
    terminated_reason: str
    final_score: float = 0.0
    token_usage: dict[str, Any] | None = None


class EnvironmentConfig(BaseModel):
    id: str
    docker_image: str
    init_commands: list[str] = []
    unit_tests: list[str]
    prompt: str


@dataclass
class TrajectoryStep:
    step_id: str
    timestamp: str
    action: Action
    result: ActionResult
    state_snapshot: dict[str, Any] | None = None


@dataclass
class Trajectory:
    trajectory_id: str
    environment_id: str
    start_time: str
    end_time: str | None
    steps: list[TrajectoryStep]
    test_results: list[TestResult]
    episode_result: EpisodeResult
    metadata: dict[str, Any]


class PluginHookType(StrEnum):
    PRE_ROLLOUT = "pre_rollout"
    POST_ROLLOUT = "post_rollout"
    PRE_ACTION = "pre_action"
    POST_ACTION = "post_action"
    PRE_EPISODE = "pre_episode"
    POST_EPISODE = "post_episode"
    PRE_TEST = "pre_test"
    POST_TEST = "post_test"


class PluginContext:
    def __init__(self, **kwargs: Any) -> None:
        self.data = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)


class BasePlugin:
    name = "base"
    priority = 0
    supported_hooks: tuple[PluginHookType, ...] = ()

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}

    async def initialize(self) -> bool:
        return True

    def is_enabled(self) -> bool:
        return True

    async def execute(self, hook: PluginHookType, context: PluginContext) -> PluginContext:
        return context


PLUGINS = '''
"""Plugins of someone who comes from Real Work."""

from tests.support.real_work import BasePlugin, PluginHookType


class Teller(BasePlugin):
    name, supported_hooks = "teller", tuple(PluginHookType)

    async def execute(self, hook, context):
        with open(self.config["file"], "a") as told:
            told.write(f"{hook.value} {context.get('environment_id')}\\n")
        return context


class Guard(BasePlugin):
    name = "guard"

    async def filter_actions(self, actions, context):
        kept = [action for action in actions if "rm -rf" not in action.content]
        for action in kept:
            action.content = action.content.replace("pip", "pip3")
        return kept


class Modifier(BasePlugin):
    name = "modifier"

    async def modify_environment(self, environment, context):
        return environment.model_copy(update={"prompt": environment.prompt + " Be quick."})


class Analyst(BasePlugin):
    name = "analyst"

    async def analyze_trajectory(self, trajectory):
        return {"kinds": [step.action.type for step in trajectory.steps]}

    async def suggest_improvements(self, trajectory):
        return ["fewer commands"]


class Judge(BasePlugin):
    name = "judge"

    async def evaluate_episode(self, episode_result, trajectory):
        return {"tests": len(episode_result.test_results), "words": "good"}


class Enough(BasePlugin):
    name = "enough"

    async def should_continue_rollout(self, context):
        return context.get("episode_count") < 1
'''

from agent_rollouts.plugins import ToolUse
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.builtin import TrajectoryAnalysis, analysis_of, category
from rollout_api.records import Observation


def use(
    number: int, tool: str, content: str = "ok", seconds: float = 1, *, error: bool = False, code: int = 0
) -> ToolUse:
    data = {"exitCode": code} if tool == "bash" else {}
    result = Observation(call_id=str(number), tool=tool, content=content, seconds=seconds, error=error, data=data)
    return ToolUse(ToolCall(str(number), tool, "{}"), result)


USES = [
    use(0, "bash", seconds=4),
    use(1, "bash", "cat: x: No such file or directory", code=1),
    use(2, "editor", "Permission denied", error=True, seconds=0),
    ToolUse(ToolCall("3", "finish", "{}"), None),
]


def test_a_failed_command_counts_as_an_error_although_its_tool_call_worked() -> None:
    analysis = analysis_of(USES)
    assert analysis["byTool"] == {"bash": 2, "editor": 1, "finish": 1}
    assert analysis["errorRate"] == 0.5
    assert analysis["errorKinds"] == {"notFound": 1, "permission": 1}
    assert analysis["seconds"] == {"total": 5, "mean": 1.667, "max": 4}
    assert analysis["slowest"][0] == {"tool": "bash", "seconds": 4}


def test_suggestions_name_only_unusual_numbers() -> None:
    plugin = TrajectoryAnalysis(error_rate=0.3, many_calls=3, slow_seconds=1)
    assert [said.split(":")[0] for said in plugin.suggestions(analysis_of(USES), 2)] == [
        "50% of the tool calls failed",
        "4 tool calls",
        "a tool call takes 1.7 s",
        "2 of the verifier's checks failed",
    ]
    assert TrajectoryAnalysis().suggestions(analysis_of([use(0, "bash")]), 0) == []
    assert analysis_of([])["errorRate"] == 0


def test_errors_are_grouped_by_their_words() -> None:
    assert category("Command timed out after 3 s") == "timeout"
    assert category("ModuleNotFoundError: No module named 'x'") == "import"
    assert category("Refused by SafetyFilter, not run: …") == "refused"
    assert category("Segmentation fault") == "other"

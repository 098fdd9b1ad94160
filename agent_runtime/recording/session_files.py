"""Convert session files of coding agents, JSON or JSON lines, into ATIF 1.7. The policy controls the files, so they are
untrusted: wrong types raise TypeError, ValueError, LookupError or AttributeError.

Sources of the formats: files that the agents of `agent_runtime/agents/catalog` wrote, in the versions named there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from agent_runtime.recording.atif import text_of
from agent_runtime.recording.trajectory_steps import Conversation, Json, metrics_of, trajectory_of
from rollout_api.rollout_job import TrajectoryFormat


def form_of_lines(lines: Sequence[Json]) -> TrajectoryFormat | None:
    """Return the format of a file with these lines, None for an unknown one."""
    for line in lines[:50]:
        message, info = line.get("message"), line.get("info")
        if line.get("type") == "session_meta" and "payload" in line:
            return TrajectoryFormat.CODEX
        if line.get("type") == "session" and "cwd" in line and "id" in line:
            return TrajectoryFormat.PI
        if "projectHash" in line and "sessionId" in line:
            return TrajectoryFormat.GEMINI_CLI
        if "llm_message" in line and line.get("kind") == "MessageEvent":
            return TrajectoryFormat.OPEN_HANDS
        if isinstance(line.get("messages"), list) and isinstance(info, dict) and "slug" in info:
            return TrajectoryFormat.OPEN_CODE
        if "sessionId" in line and isinstance(message, dict):
            return TrajectoryFormat.QWEN_CODE if "parts" in message else TrajectoryFormat.CLAUDE_CODE
    return None


def _from_claude_code(lines: Sequence[Json]) -> Json:
    talk, version, model, prompted = Conversation(), None, None, False
    for line in lines:
        version, when = line.get("version") or version, line.get("timestamp")
        if line.get("isSidechain"):
            continue  # a sub-agent
        if not prompted and (parts := (line.get("attachment") or {}).get("systemPrompt")):
            prompted = True
            talk.message("system", "\n".join(map(str, parts)), when)
        message = line.get("message") or {}
        if line.get("type") == "user":
            for part in _parts(message.get("content")):
                if part.get("type") == "tool_result":
                    talk.result(part.get("tool_use_id"), text_of(part.get("content")))
                else:
                    talk.message("user", text_of([part]), when)
        elif line.get("type") == "assistant":
            model = message.get("model") or model
            # One answer has a line for each of its parts.
            step = talk.answer(when, message.get("id"))
            for part in _parts(message.get("content")):
                if part.get("type") == "tool_use":
                    talk.call(step, part.get("id"), part.get("name"), part.get("input"))
                elif part.get("type") in ("thinking", "redacted_thinking"):
                    talk.say(step, str(part.get("thinking") or ""), "reasoning_content")
                else:
                    talk.say(step, text_of([part]).removesuffix("\n"))
            read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            step |= _usage_of(message.get("usage") or {}, read, "output_tokens")
    return trajectory_of(name="Claude Code", version=version, model=model, steps=talk.finish())


def _from_codex(lines: Sequence[Json]) -> Json:
    talk, version, model = Conversation(), None, None
    for line in lines:
        kind, payload, when = line.get("type"), line.get("payload") or {}, line.get("timestamp")
        if kind == "session_meta":
            version = payload.get("cli_version") or version
            if instructions := text_of((payload.get("base_instructions") or {}).get("text")):
                talk.message("system", instructions, when)
        elif kind == "turn_context":
            model = payload.get("model") or model
        elif kind == "response_item":
            _codex_item(talk, payload, when)
        elif kind == "event_msg" and payload.get("type") == "token_count" and talk.latest is not None:
            usage = (payload.get("info") or {}).get("last_token_usage") or {}
            talk.latest.update(metrics_of(usage.get("input_tokens"), usage.get("output_tokens")))
    return trajectory_of(name="Codex", version=version, model=model, steps=talk.finish())


def _codex_item(talk: Conversation, item: Json, when: object) -> None:
    """Add an item of OpenAI's Responses."""
    kind = str(item.get("type"))
    if kind.endswith("_output"):
        output = item.get("output")
        talk.result(item.get("call_id"), text_of(output.get("content") if isinstance(output, dict) else output))
    elif kind.endswith("_call"):
        arguments = next((item[name] for name in ("arguments", "input", "action") if name in item), None)
        if kind == "custom_tool_call":
            arguments = {"input": arguments}
        talk.call(talk.answer(when), item.get("call_id"), item.get("name") or kind, arguments)
    elif kind == "reasoning":
        thought = text_of(item.get("summary") or item.get("content"))
        talk.say(talk.answer(when), thought, "reasoning_content")
    elif kind == "message":
        text = text_of(item.get("content")).removesuffix("\n")
        if item.get("role") == "assistant":
            talk.say(talk.answer(when), text)
        else:
            talk.message("system" if item.get("role") in ("system", "developer") else "user", text, when)


def _from_qwen_code(lines: Sequence[Json]) -> Json:
    talk, version, model = Conversation(), None, None
    for line in lines:
        version, when, message = line.get("version") or version, line.get("timestamp"), line.get("message") or {}
        parts = _parts(message.get("parts"))
        if line.get("type") == "assistant":
            model = line.get("model") or model
            step = talk.answer(when, line.get("uuid"))
            _add_google_parts(talk, step, parts)
            step |= _google_usage(line.get("usageMetadata") or {})
        else:
            for part in parts:
                if (answered := part.get("functionResponse")) is not None:
                    talk.result(answered.get("id"), _google_result(answered.get("response")))
                elif text := text_of(part.get("text")):
                    talk.message("user", text, when)
    return trajectory_of(name="Qwen Code", version=version, model=model, steps=talk.finish())


def _from_gemini_cli(lines: Sequence[Json]) -> Json:
    talk, model = Conversation(), None
    # A later line with the same id replaces an earlier one. Older versions write one object with all messages.
    messages: dict[object, Json] = {}
    for line in lines:
        changed = line.get("$set") or line
        for message in [*_parts(changed.get("messages")), line]:
            if "type" in message:
                messages[str(message.get("id"))] = message
    for message in messages.values():
        when, parts = message.get("timestamp"), _parts(message.get("content"))
        if message["type"] != "gemini":
            # Results are with their calls, too.
            if text := "\n".join(text_of(part.get("text")) for part in parts if "functionResponse" not in part):
                talk.message("user", text, when)
            continue
        model = message.get("model") or model
        step = talk.answer(when, message.get("id"))
        for thought in _parts(message.get("thoughts")):
            talk.say(step, text_of(thought.get("description")), "reasoning_content")
        _add_google_parts(talk, step, parts)
        tokens = message.get("tokens") or {}
        step |= metrics_of(tokens.get("input"), tokens.get("output"))
        calls = _parts(message.get("toolCalls"))
        for call in calls:
            talk.call(step, call.get("id"), call.get("name"), call.get("args"))
        for call in calls:
            for part in _parts(call.get("result")):
                talk.result(call.get("id"), _google_result((part.get("functionResponse") or {}).get("response")))
    return trajectory_of(name="Gemini CLI", version=None, model=model, steps=talk.finish())


def _from_pi(lines: Sequence[Json]) -> Json:
    talk, model = Conversation(), None
    for line in lines:
        if line.get("type") != "message":
            continue
        message, when = line.get("message") or {}, line.get("timestamp")
        role, parts = message.get("role"), _parts(message.get("content"))
        if role == "assistant":
            model = message.get("model") or model
            step = talk.answer(when, line.get("id"))
            for part in parts:
                if part.get("type") == "toolCall":
                    talk.call(step, part.get("id"), part.get("name"), part.get("arguments"))
                elif part.get("type") == "thinking":
                    talk.say(step, text_of(part.get("thinking")), "reasoning_content")
                else:
                    talk.say(step, text_of([part]).removesuffix("\n"))
            step |= _usage_of(message.get("usage") or {}, ("input", "cacheRead", "cacheWrite"), "output")
        elif role == "toolResult":
            talk.result(message.get("toolCallId"), text_of(parts))
        else:
            texts = [text_of(parts), *map(str, (message.get("sections") or {}).values())]
            talk.message("system" if role == "system" else "user", "\n".join(filter(None, texts)), when)
    return trajectory_of(name="Pi", version=None, model=model, steps=talk.finish())


def _from_open_code(lines: Sequence[Json]) -> Json:
    talk, model, content = Conversation(), None, lines[0]
    for message in content["messages"]:
        info, parts = message.get("info") or {}, _parts(message.get("parts"))
        created = (info.get("time") or {}).get("created")
        when = created / 1000 if isinstance(created, int | float) else None
        if info.get("role") != "assistant":
            talk.message("user", text_of([part for part in parts if part.get("type") == "text"]), when)
            continue
        model = info.get("modelID") or model
        step = talk.answer(when, info.get("id"))
        calls = [part for part in parts if part.get("type") == "tool"]
        for part in parts:
            if part.get("type") in ("text", "reasoning"):
                field = "message" if part["type"] == "text" else "reasoning_content"
                talk.say(step, text_of(part.get("text")).removesuffix("\n"), field)
        for call in calls:
            talk.call(step, call.get("callID"), call.get("tool"), (call.get("state") or {}).get("input"))
        tokens = info.get("tokens") or {}
        read = {**tokens, **(tokens.get("cache") or {})}
        step |= _usage_of(read, ("input", "read", "write"), "output")
        for call in calls:
            state = call.get("state") or {}
            talk.result(call.get("callID"), text_of(state.get("output") or state.get("error")))
    version = (content.get("info") or {}).get("version")
    return trajectory_of(name="OpenCode", version=version, model=model, steps=talk.finish())


def _from_open_hands(lines: Sequence[Json]) -> Json:
    talk, model, usages = Conversation(), None, dict[str, Json]()
    for line in lines:
        kind, when = line.get("kind"), line.get("timestamp")
        answer_id, call_id = str(line.get("llm_response_id")), line.get("tool_call_id")
        if "usage_to_metrics" in (line.get("stats") or {}):
            for usage in (line["stats"]["usage_to_metrics"].get("agent") or {}).get("token_usages") or []:
                usages[str(usage.get("response_id"))] = usage
                model = str(usage.get("model")).removeprefix("openai/")
        elif kind == "SystemPromptEvent":
            prompts = [line.get("system_prompt"), line.get("dynamic_context")]
            talk.message("system", text_of([part for part in prompts if part]), when)
        elif kind == "MessageEvent" and line.get("source") != "agent":
            talk.message("user", text_of((line.get("llm_message") or {}).get("content")), when)
        elif kind in ("ActionEvent", "MessageEvent"):
            step = talk.answer(when, answer_id)
            message = line.get("llm_message") or {"content": line.get("thought"), **line}
            talk.say(step, text_of(message.get("reasoning_content")), "reasoning_content")
            talk.say(step, text_of(message.get("content")).removesuffix("\n"))
            if kind == "ActionEvent":
                talk.call(step, call_id, line.get("tool_name"), (line.get("tool_call") or {}).get("arguments"))
            step |= _usage_of(usages.get(answer_id) or {}, ("prompt_tokens",), "completion_tokens")
        elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
            found = (line.get("observation") or {}).get("content") or line.get("error") or line.get("rejection_reason")
            talk.result(call_id, text_of(found))
    return trajectory_of(name="OpenHands", version=None, model=model, steps=talk.finish())


def _usage_of(usage: Mapping[str, Any], prompt: Sequence[str], completion: str) -> Json:
    """Return the metrics of an answer whose prompt is counted in parts."""
    return metrics_of(sum(usage.get(name) or 0 for name in prompt), usage.get(completion))


def _add_google_parts(talk: Conversation, step: Json, parts: Iterable[Json]) -> None:
    """Add the parts of an answer in the form of Google's Gemini API."""
    for part in parts:
        if (call := part.get("functionCall")) is not None:
            talk.call(step, call.get("id"), call.get("name"), call.get("args"))
        else:
            field = "reasoning_content" if part.get("thought") else "message"
            talk.say(step, text_of(part.get("text")).removesuffix("\n"), field)


def _google_result(response: object) -> str:
    found = response if isinstance(response, dict) else {"output": response}
    return text_of(next((found[name] for name in ("output", "error") if name in found), str(response)))


def _google_usage(usage: Mapping[str, object]) -> Json:
    return metrics_of(usage.get("promptTokenCount"), usage.get("candidatesTokenCount"))


def _parts(content: object) -> list[Json]:
    """Return the parts of a message's content, which may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise TypeError(f"a text or a list expected, got {type(content).__name__}")
    return [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]


SESSION_FILES: Final[Mapping[TrajectoryFormat, Callable[[Sequence[Json]], Json]]] = {
    TrajectoryFormat.CLAUDE_CODE: _from_claude_code,
    TrajectoryFormat.CODEX: _from_codex,
    TrajectoryFormat.QWEN_CODE: _from_qwen_code,
    TrajectoryFormat.PI: _from_pi,
    TrajectoryFormat.OPEN_CODE: _from_open_code,
    TrajectoryFormat.GEMINI_CLI: _from_gemini_cli,
    TrajectoryFormat.OPEN_HANDS: _from_open_hands,
}

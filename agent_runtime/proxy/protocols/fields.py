"""Parse the fields of a request. Each is supported, ignored, dropped with a note, or refused. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from agent_runtime.proxy.chat import BadRequest, JsonObject, Note, NoteKind
from rollout_api.model import Sampling

T = TypeVar("T")

EMPTY: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
"""Values that mean that a field is not set."""

JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENGINE_SAMPLING = words(
    "allowed_token_ids bad_words chat_template_kwargs ignore_eos include_stop_str_in_output length_penalty min_p "
    "min_tokens repetition_penalty skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs "
    "top_k"
)
"""Fields of vLLM's OpenAI API besides OpenAI's own (vLLM, docs/serving/openai_compatible_server.md)."""

NEVER_PASSED = words(
    "add_generation_prompt add_special_tokens best_of bootstrap_host bootstrap_port bootstrap_room cache_salt "
    "chat_template custom_logit_processor data_parallel_rank detokenize documents ec_transfer_params echo input_ids "
    "kv_transfer_params logits_processors logprobs lora_path max_completion_tokens max_new_tokens max_tokens "
    "messages model n priority prompt prompt_embeds prompt_logprobs request_id return_hidden_states return_token_ids "
    "return_tokens_as_token_ids rid seed session_id stop stream stream_options suffix temperature tool_choice tools "
    "top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search vllm_xargs"
)
"""Unknown fields with these names are dropped. The proxy sets them itself, or they would change the prompt, the limits,
or what is recorded.
"""

MOST_NOTES = 64
"""Most notes on one request."""


class Notes:
    """Collects the dropped parts of a request."""

    def __init__(self) -> None:
        self.all: list[Note] = []

    def drop(self, kind: NoteKind, where: str, reason: str) -> None:
        if len(self.all) < MOST_NOTES:
            self.all.append(Note(kind, f"{where:.100}: {reason:.200}"))


@dataclass(frozen=True, slots=True)
class Fields:
    """How one API's request fields are treated."""

    honoured: frozenset[str]
    passed: frozenset[str]
    """Sent to the inference server unchanged."""
    ignored: frozenset[str]
    """Without effect on the model."""
    dropped: Mapping[str, str]
    """Dropped with a note; the value is the reason."""
    refused: Mapping[str, str]
    """Refused, because the caller would not notice that a dropped one changes the answer; the value is the reason."""

    def check(self, body: Mapping[str, Any], notes: Notes, *, passes_unknown: bool = False) -> frozenset[str]:
        """Note the dropped fields; return the unknown ones to pass on, if the API's fields are also those of the
        inference server. Null, false, empty and `none` are the same as no value. Raises BadRequest.
        """
        for name, reason in self.refused.items():
            if body.get(name) not in EMPTY:
                raise BadRequest(f"{name}: {reason}", name)
        for name, reason in self.dropped.items():
            if body.get(name) not in EMPTY:
                notes.drop(NoteKind.FIELD, name, reason)
        known = self.honoured | self.passed | self.ignored | self.dropped.keys() | self.refused.keys()
        unknown = {name for name, value in body.items() if name not in known and value is not None}
        passed = frozenset(unknown - NEVER_PASSED) if passes_unknown else frozenset()
        for name in sorted(unknown - passed):
            notes.drop(NoteKind.FIELD, name, "unknown field")
        return passed


def one(body: Mapping[str, Any], *names: str) -> None:
    """Refuse several answers to one request: each call is recorded with one."""
    for name in names:
        if body.get(name) not in (None, 1):
            raise BadRequest(f"{name}: {body[name]!r}; only 1 is supported; send several requests instead", name)


def typed(value: Any, form: type[T], where: str) -> T:
    if not isinstance(value, form) or (form is int and isinstance(value, bool)):
        raise BadRequest(f"{where}: expected {JSON_NAMES[form]}, got {value!r:.100}", where)
    return value


def given(body: Mapping[str, Any], name: str, form: type[T], default: T) -> T:
    value = body.get(name)
    return default if value is None else typed(value, form, name)


def required(body: Mapping[str, Any], name: str, form: type[T], where: str | None = None) -> T:
    """Return a required field. `where` is the path of its object."""
    path = f"{where}.{name}" if where else name
    if body.get(name) is None:
        raise BadRequest(f"Missing required parameter: {path}; expected {JSON_NAMES[form]}", path)
    return typed(body[name], form, path)


def objects(values: Any, where: str) -> Sequence[JsonObject]:
    return [typed(value, dict, f"{where}[{i}]") for i, value in enumerate(typed(values, list, where))]


def each(values: Any, where: str, parse: Callable[[JsonObject, str], T | None]) -> list[T]:
    """Return the results of `parse` for each object of a list and its path, except None; a missing list counts as
    empty.
    """
    parsed = (parse(value, f"{where}[{i}]") for i, value in enumerate(objects(values or [], where)))
    return [value for value in parsed if value is not None]


def sampling(
    body: Mapping[str, Any],
    *,
    max_tokens: Collection[str],
    stop: str | None,
    extra: Mapping[str, Any],
    passed: Collection[str],
) -> Sampling:
    """Return the sampling. `max_tokens` and `stop` name the fields of this API (None: it has none).

    `passed` are fields that are passed on unchanged; `extra` are fields with another name in chat completions, by that
    name.
    """
    limits = [(name, typed(body[name], int, name)) for name in max_tokens if body.get(name) is not None]
    stops = (body.get(stop) if stop else None) or []
    fields = {
        "temperature": body.get("temperature"),
        "topP": body.get("top_p"),
        "maxTokens": min((limit for _, limit in limits), default=None),
        "stop": [stops] if isinstance(stops, str) else stops,
        "extra": {name: body[name] for name in passed if body.get(name) is not None} | dict(extra),
    }
    try:
        return Sampling.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        name = {"topP": "top_p", "maxTokens": limits[0][0] if limits else "max_tokens", "stop": stop}.get(
            field
        ) or field
        raise BadRequest(f"{name}: {first['msg']}, got {first['input']!r:.100}", name) from None


def fitting_choice(extra: JsonObject, tools: Sequence[JsonObject], notes: Notes) -> JsonObject:
    """Return `Sampling.extra` without a choice that the remaining tools do not allow, after some were dropped."""
    choice = extra.get("tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    was_dropped = any(note.kind is NoteKind.TOOL for note in notes.all)
    fits = choice["function"].get("name") in names if isinstance(choice, dict) else choice is None or bool(names)
    if fits or not was_dropped:
        return extra
    notes.drop(NoteKind.TOOL_CHOICE, "tool_choice", "the chosen tool was dropped")
    return {name: value for name, value in extra.items() if name != "tool_choice"}

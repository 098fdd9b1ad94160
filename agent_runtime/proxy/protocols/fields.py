"""Parse the fields of a request. Each field is supported, ignored or refused; unknown fields are refused."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from agent_runtime.proxy.chat import BadRequest, JsonObject
from rollout_api.model import Sampling

T = TypeVar("T")

JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}

ENGINE_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "chat_template_kwargs",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
    }
)
"""Fields of vLLM's OpenAI API besides OpenAI's own (vLLM, docs/serving/openai_compatible_server.md)."""


def check_known(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown fields, as the API itself does."""
    for name, value in body.items():
        if name not in known and value is not None:
            raise BadRequest(f"Unrecognized request argument supplied: {name}", name)


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse fields of the API that the proxy does not support; null, false, empty and `none` are accepted."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, 0, "", "none", [], {}):
            raise BadRequest(f"{name}: {reason}", name)


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


def each(values: Any, where: str, parse: Callable[[JsonObject, str], T]) -> list[T]:
    """Return the results of `parse` for each object of a list and its path; a missing list counts as empty."""
    return [parse(value, f"{where}[{i}]") for i, value in enumerate(objects(values or [], where))]


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

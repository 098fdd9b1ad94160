"""A model from the variables that the providers' own clients read: OPENAI_*, ANTHROPIC_*, and LLM_* for any server."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from agent_runtime.models.base import ModelConfigError
from rollout_api.model import ApiKeySource, Endpoint, EndpointApi, ModelSpec


class _Family(NamedTuple):
    prefix: str
    model: str
    """Variable with the model's name."""
    api: EndpointApi
    base_url: str | None
    """Default URL of the provider."""


_FAMILIES: Final = (
    _Family("OPENAI", "OPENAI_MODEL", EndpointApi.OPENAI, "https://api.openai.com/v1"),
    _Family("ANTHROPIC", "ANTHROPIC_MODEL", EndpointApi.ANTHROPIC, "https://api.anthropic.com/v1"),
    _Family("LLM", "LLM_MODEL_NAME", EndpointApi.OPENAI, None),
)


def model_from_environment(environ: Mapping[str, str]) -> ModelSpec:
    """Return `spec.model` from OPENAI_MODEL, ANTHROPIC_MODEL or LLM_MODEL_NAME, with the matching _BASE_URL and
    _API_KEY.

    Raises ModelConfigError unless exactly one of the three is set. Only for programs: a manifest names its model, so
    that it is the same everywhere.
    """
    named = [family for family in _FAMILIES if environ.get(family.model)]
    if len(named) != 1:
        found = " and ".join(family.model for family in named) or "none of them"
        raise ModelConfigError(
            "NoModel",
            f"{found} {'are' if len(named) > 1 else 'is'} set in the environment; set exactly one of "
            f"{', '.join(family.model for family in _FAMILIES)}, with the matching _BASE_URL and _API_KEY",
        )
    family = named[0]
    base_url = environ.get(f"{family.prefix}_BASE_URL") or family.base_url
    if base_url is None:
        raise ModelConfigError("NoBaseURL", f"{family.model} is set, but {family.prefix}_BASE_URL is not; set it")
    base_url = base_url.rstrip("/")
    # Anthropic's own clients add /v1 to the variable, so its value has none.
    if family.api is EndpointApi.ANTHROPIC and not base_url.endswith("/v1"):
        base_url += "/v1"
    key = f"{family.prefix}_API_KEY"
    return ModelSpec(
        endpoint=Endpoint(
            base_url=base_url,
            name=environ[family.model],
            api=family.api,
            api_key_from=ApiKeySource(env=key) if environ.get(key) else None,
        )
    )

"""A program that names no server calls the one that the environment names, with its key, and never another."""

import pytest

from agent_runtime.models.base import ModelConfigError
from agent_runtime.models.providers.from_environment import model_from_environment
from rollout_api.model import EndpointApi


@pytest.mark.parametrize(
    ("environ", "url", "api", "key"),
    [
        ({"OPENAI_MODEL": "m"}, "https://api.openai.com/v1", EndpointApi.OPENAI, None),
        (
            {"OPENAI_MODEL": "m", "OPENAI_BASE_URL": "http://a:8000/v1/", "OPENAI_API_KEY": "k"},
            "http://a:8000/v1",
            EndpointApi.OPENAI,
            "OPENAI_API_KEY",
        ),
        (
            {"ANTHROPIC_MODEL": "m", "ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "other"},
            "https://api.anthropic.com/v1",
            EndpointApi.ANTHROPIC,
            "ANTHROPIC_API_KEY",
        ),
        (
            {"ANTHROPIC_MODEL": "m", "ANTHROPIC_BASE_URL": "http://a:8000"},
            "http://a:8000/v1",
            EndpointApi.ANTHROPIC,
            None,
        ),
        (
            {"LLM_MODEL_NAME": "m", "LLM_BASE_URL": "http://a/v1", "LLM_API_KEY": "k"},
            "http://a/v1",
            EndpointApi.OPENAI,
            "LLM_API_KEY",
        ),
    ],
)
def test_endpoint_comes_from_the_variables_of_one_provider(
    environ: dict[str, str], url: str, api: EndpointApi, key: str | None
) -> None:
    endpoint = model_from_environment(environ).endpoint
    assert endpoint is not None
    assert (endpoint.base_url, endpoint.name, endpoint.api) == (url, "m", api)
    assert (endpoint.api_key_from.env if endpoint.api_key_from else None) == key


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OPENAI_API_KEY": "k"}, "none of them is set in the environment; set exactly one of OPENAI_MODEL, "),
        ({"OPENAI_MODEL": "m", "LLM_MODEL_NAME": "m"}, "OPENAI_MODEL and LLM_MODEL_NAME are set in the environment; "),
        ({"LLM_MODEL_NAME": "m"}, "LLM_MODEL_NAME is set, but LLM_BASE_URL is not; set it"),
    ],
)
def test_ambiguous_environment_is_refused_with_the_reason(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        model_from_environment(environ)
    assert said in str(caught.value)

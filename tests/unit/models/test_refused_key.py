"""A model server that refuses a request because of its key."""

import pytest

from agent_runtime.models.base import ModelConfigError
from agent_runtime.models.http_client import Answer, JsonClient


@pytest.mark.parametrize("field", ["model.endpoint.apiKeyFrom", "VLLM_API_KEY from its spec.env"])
def test_refusal_without_a_key_names_the_field_of_endpoint_and_model_server(field: str) -> None:
    with pytest.raises(ModelConfigError, match=field):
        JsonClient("http://m", {}, "")._raise_for(Answer(401, {"error": "no key"}))

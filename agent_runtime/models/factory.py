"""Creates models from `spec.model`."""

from collections.abc import Mapping

from agent_runtime.extensions import ExtensionError, load_object
from agent_runtime.models.api_key import NoKey, read_api_key
from agent_runtime.models.base import Model, ModelConfigError
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.providers.anthropic_endpoint import AnthropicEndpoint
from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.models.providers.scripted import ScriptedModel
from rollout_api.keys import MODEL_KEY_VARIABLE
from rollout_api.model import Endpoint, EndpointApi, ModelSpec


def open_model(spec: ModelSpec, environ: Mapping[str, str]) -> Model:
    """Return the model of a manifest without connecting yet. Raises ModelConfigError."""
    if spec.endpoint is not None:
        api_key, origin = _api_key(spec.endpoint, environ)
        if spec.endpoint.api is EndpointApi.ANTHROPIC:
            return AnthropicEndpoint(spec.endpoint, api_key, origin)
        return InferenceClient(
            spec.endpoint.base_url,
            spec.endpoint.name,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            key_origin=origin,
            call_seconds=float(spec.endpoint.call_seconds),
            experts=spec.routed_experts,
        )
    if spec.scripted is not None:
        return ScriptedModel(spec.scripted)
    if spec.function is not None:
        try:
            return FunctionModel(load_object(spec.function, "model.function"), spec.function)
        except ExtensionError as error:
            raise ModelConfigError("NotFound", str(error)) from error
    field = "serverRef" if spec.server_ref is not None else "server"
    raise ModelConfigError(
        "NeedsCluster",
        f"model.{field} names a ModelServer, which only a cluster runs; apply the job there, or use model.endpoint here",
    )


def _api_key(endpoint: Endpoint, environ: Mapping[str, str]) -> tuple[str | None, str]:
    if endpoint.api_key_from is None:
        return None, ""
    try:
        return read_api_key(endpoint.api_key_from, environ, MODEL_KEY_VARIABLE, "endpoint.apiKeyFrom")
    except NoKey as error:
        raise ModelConfigError("NoKey", str(error)) from None

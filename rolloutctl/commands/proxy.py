"""`rolloutctl proxy` and `rolloutctl proxy-worker`: a standalone session proxy, and a worker that serves a model to a proxy
which cannot connect to it.
"""

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from agent_runtime.models.factory import open_model
from agent_runtime.proxy.serve import (
    ADMIN_KEY_VARIABLE,
    ProxySettings,
    Relay,
    admin_key,
    log_to_stderr,
    serve_proxy,
    serve_worker,
)
from rollout_api.model import ApiKeySource, Endpoint, EndpointApi, ModelSpec
from rolloutctl.errors import CommandError, listening

DEFAULT_STORE = "sessions"

_OPTIONS = {"base_url": "endpoint", "baseURL": "endpoint", "name": "model", "env": "api-key-env"}
"""Options whose name differs from the settings' field."""

ModelOption = Annotated[str, typer.Option("--model", help="Name of the model.")]
ApiOption = Annotated[EndpointApi, typer.Option("--api", help="Protocol of the endpoint.", case_sensitive=False)]
KeyVariableOption = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable with the endpoint's API key.")
]
AdminKeyOption = Annotated[
    Path | None, typer.Option("--admin-key-file", help=f"File with the admin key; by default ${ADMIN_KEY_VARIABLE}.")
]


async def proxy(
    model: ModelOption,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Base URL of the model's server, up to /v1.")
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="Use models that connect with proxy-worker.")] = False,
    api: ApiOption = EndpointApi.OPENAI,
    api_key_env: KeyVariableOption = None,
    store: Annotated[str, typer.Option("--store", help="URI or folder for the sessions.")] = DEFAULT_STORE,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8080,
    admin_key_file: AdminKeyOption = None,
    keyless: Annotated[
        bool,
        typer.Option("--keyless", help="Require no keys. Use it only if no other clients can connect to the port."),
    ] = False,
) -> None:
    """Serve a model to agents, each with its own key, and record each session with its tokens."""
    if (endpoint is None) != relay:
        raise CommandError("give --endpoint URL, or --relay")
    try:
        settings = ProxySettings(
            store=store,
            endpoint=None if endpoint is None else _endpoint(endpoint, model, api, api_key_env),
            relay=Relay(model=model) if relay else None,
            host=host,
            port=port,
            keyless=keyless,
        )
    except ValidationError as error:
        raise _wrong(error) from None
    log_to_stderr()
    if keyless and admin_key_file is not None:
        raise CommandError("--keyless and --admin-key-file exclude each other; remove one")
    with listening(host, port):
        await serve_proxy(settings, None if keyless else admin_key(admin_key_file, os.environ), os.environ)


async def proxy_worker(
    url: Annotated[
        list[str], typer.Option("--url", help="URL of a proxy, such as https://proxy.example; may be repeated.")
    ],
    model: ModelOption,
    endpoint: Annotated[str, typer.Option("--endpoint", help="Base URL of the model's server, up to /v1.")],
    api: ApiOption = EndpointApi.OPENAI,
    api_key_env: KeyVariableOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of this worker; by default the host's name with a random suffix.")
    ] = None,
    admin_key_file: AdminKeyOption = None,
    keyless: Annotated[bool, typer.Option("--keyless", help="The proxy is keyless.")] = False,
) -> None:
    """Connect to proxies that run with --relay, and serve them a model that they cannot connect to."""
    try:
        served = open_model(ModelSpec(endpoint=_endpoint(endpoint, model, api, api_key_env)), os.environ)
    except ValidationError as error:
        raise _wrong(error) from None
    log_to_stderr()
    own = name or f"{socket.gethostname()}-{secrets.token_hex(3)}"
    await serve_worker(url, None if keyless else admin_key(admin_key_file, os.environ), served, own)


def _endpoint(url: str, model: str, api: EndpointApi, key_variable: str | None) -> Endpoint:
    source = None if key_variable is None else ApiKeySource(env=key_variable)
    return Endpoint(base_url=url, name=model, api=api, api_key_from=source)


def _wrong(error: ValidationError) -> CommandError:
    problem = error.errors(include_url=False)[0]
    field = str(problem["loc"][-1])
    return CommandError(f"--{_OPTIONS.get(field, field)}: {problem['msg']}; got {problem['input']!r:.100}")

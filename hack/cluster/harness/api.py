"""The harness's client of the Kubernetes API: one request, apply, and watch, over HTTPS with a certificate."""

import contextlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Plural name, and whether the kind has namespaces; all kinds that the harness applies.
_KINDS = {
    "ClusterRole": ("clusterroles", False),
    "ClusterRoleBinding": ("clusterrolebindings", False),
    "ConfigMap": ("configmaps", True),
    "Deployment": ("deployments", True),
    "Node": ("nodes", False),
    "Service": ("services", True),
    "ServiceAccount": ("serviceaccounts", True),
}


class ApiError(Exception):
    """The API server refused a request; `status` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """A client of an API server; `user` names its certificate in the folder `pki`."""

    def __init__(self, server: str, pki: Path, user: str) -> None:
        self._address = urllib.parse.urlsplit(server).netloc
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / f"{user}.crt", pki / f"{user}.key")

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", seconds: float = 10
    ) -> Any:
        """Makes one request with a JSON body; returns the JSON of the response. Raises ApiError, and OSError without a
        response.
        """
        text = None if body is None else json.dumps(body)
        with self._response(method, path, text, content_type, seconds) as response:
            content = response.read()
        return json.loads(content) if content.startswith(b"{") else content.decode()

    def request_unless(self, status: int, method: str, path: str, body: Any = None) -> None:
        """Makes one request; accepts this error status too (the object exists already, or no longer)."""
        try:
            self.request(method, path, body)
        except ApiError as error:
            if error.status != status:
                raise

    def apply(self, manifest: dict[str, Any], subresource: str = "") -> None:
        """Server-side apply. Raises ApiError, and KeyError for a kind that the harness never applies."""
        path = object_path(manifest) + (f"/{subresource}" if subresource else "")
        query = "?fieldManager=harness&force=true"
        self.request("PATCH", path + query, manifest, "application/apply-patch+yaml")

    def watch(self, path: str, query: dict[str, str], seconds: int) -> Iterator[dict[str, Any]]:
        """Yields the events of a collection for `seconds`. Raises ApiError (410: list the collection again) and OSError."""
        parameters = urllib.parse.urlencode(query | {"watch": "1", "timeoutSeconds": str(seconds)})
        with self._response("GET", f"{path}?{parameters}", None, "application/json", seconds + 10) as response:
            while line := response.readline():
                event: dict[str, Any] = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 500)), str(event["object"].get("message")))
                yield event

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: str | None, content_type: str, seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(response.status, response.read().decode(errors="replace")[:500])
            yield response
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()


def object_path(manifest: dict[str, Any]) -> str:
    plural, namespaced = _KINDS[manifest["kind"]]
    version = manifest["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = f"/namespaces/{manifest['metadata']['namespace']}" if namespaced else ""
    return f"{root}{namespace}/{plural}/{manifest['metadata']['name']}"

"""Reads a cluster's objects over one connection, because tests read several times a second and a kubectl takes 0.2 s of
processor time.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kubernetes import config

Object = dict[str, Any]


class ClusterReader:
    """Reads with the credentials of a kubeconfig. Objects are in camelCase, as the API server has them."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api = config.new_client_from_config(str(kubeconfig), persist_config=False)
        token = self._api.configuration.get_api_key_with_prefix("BearerToken")
        self._headers = {"Accept": "application/json"} | ({"Authorization": token} if token else {})

    def get(self, kind: str, name: str, namespace: str) -> Object | None:
        """Return an object; None if it does not exist. `kind` may be plural, singular or short, as for kubectl."""
        return self._read(f"{self._folder(kind, namespace)}/{name}")

    def list(self, kinds: str, namespace: str, selector: str = "") -> list[Object]:
        """Return the objects of these kinds (separated by commas), each with its `kind`."""
        found: list[Object] = []
        for kind in kinds.split(","):
            query = f"?labelSelector={quote(selector)}" if selector else ""
            listed = self._read(self._folder(kind, namespace) + query) or {"items": [], "kind": ""}
            found += [{"kind": listed["kind"].removesuffix("List"), **item} for item in listed["items"]]
        return found

    def _folder(self, kind: str, namespace: str) -> str:
        group, plural, namespaced = self._kinds[kind]
        return f"{group}/namespaces/{namespace}/{plural}" if namespaced and namespace else f"{group}/{plural}"

    @cached_property
    def _kinds(self) -> dict[str, tuple[str, str, bool]]:
        """Return the location of each kind, by each of its names: path of the group, plural, whether in namespaces."""
        groups = ["/api/v1"] + [
            f"/apis/{group['preferredVersion']['groupVersion']}" for group in (self._read("/apis") or {})["groups"]
        ]
        found: dict[str, tuple[str, str, bool]] = {}
        for group in groups:
            for resource in (self._read(group) or {})["resources"]:
                if "/" not in resource["name"]:
                    for name in (resource["name"], resource["singularName"], *resource.get("shortNames", [])):
                        found.setdefault(name, (group, resource["name"], resource["namespaced"]))
        return found

    def _read(self, path: str) -> Object | None:
        try:
            url = self._api.configuration.host + path
            reply = self._api.call_api("GET", url, self._headers, _request_timeout=30)
            data = reply.read()
        except Exception as error:  # as a failed kubectl fails the test
            raise AssertionError(f"GET {path}: {error}") from error
        if reply.status == 404:
            return None
        assert reply.status == 200, f"GET {path}: {reply.status} {data[:500]!r}"
        found: Object = json.loads(data)
        return found

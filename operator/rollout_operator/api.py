"""Client of the API server over one aiohttp session: list, watch, read, and the writes that the operator needs.

The official client takes twice the memory and four times as long per write (measured, docs/operator.md).

Lists are read in pages of a bounded size in bytes. A parsed object takes over twenty times the memory of its JSON, and a
tenant's object may have a megabyte. A fixed small number of objects per page would make lists of small objects slow.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import aiohttp
import kopf

from rollout_api.nesting import read_json
from rollout_api.on_cluster.objects import KINDS, Manifest
from rollout_api.server_side_apply import APPLY_TYPE, apply_body
from rollout_operator import clock
from rollout_operator.config import WRITE_SECONDS
from rollout_operator.tenant_limits import shortened
from rollout_operator.world import is_by_admission

FIRST_PAGE, LARGEST_PAGE = 10, 250
"""Objects in the first page, and the most in any page."""
PAGE_BYTES: Final = 2**20
MOST_PAGE_BYTES: Final = 4 * PAGE_BYTES
"""Limit of a page. A larger page is requested again with fewer objects, unless it has only one."""


def next_limit(limit: int, size: int) -> int:
    """Return the next page's limit, given that `limit` objects had `size` bytes (or more, if the page was cut off)."""
    return max(1, min(LARGEST_PAGE, limit * PAGE_BYTES // max(1, size)))


log = logging.getLogger(__name__)

_CONFLICTING_WRITE = "please apply your changes to the latest version and try again"
UNREACHABLE = 0
"""Status of an error without a response: no connection, a broken connection, or a time-out."""
LONGEST_RETRY_SECONDS: Final = 60.0
"""Longest pause that a response may ask for: an API server asks for seconds, and a proxy's page for whatever."""
LIST_SECONDS = 60.0
SILENCE_SECONDS = 120.0
"""Time without data after which a watch counts as broken. The API server sends a bookmark about once a minute."""
WATCH_SECONDS = 1800
"""The API server ends a watch after this time. The informer then resumes it at once."""


class ApiError(Exception):
    """The API server refused a request, failed, or was unreachable."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        self.message = shortened(message)
        """What failed. Events, conditions and facts keep it, and an API server quotes whole fields of a tenant's object."""
        super().__init__(self.message)
        self.status = status
        """HTTP status, or UNREACHABLE."""
        self.retry_after = retry_after
        """Seconds to wait before the next request, as the API server asked."""

    @property
    def refused(self) -> bool:
        """Whether the API server refuses the object itself (Pod Security, a policy, a field), so that a retry is
        useless.

        Other 403 responses may be temporary: a full quota, a missing ServiceAccount, rights that are not granted yet.
        """
        return self.status in (400, 422) or (self.status == 403 and is_by_admission(self.message))

    @property
    def of_another_uid(self) -> bool:
        """Whether the object was deleted. Another object may have its name."""
        # The message contains the object's name, which may contain "uid" too.
        return self.status == 409 and "uid" in self.message.lower() and not self.is_overtaken

    @property
    def is_overtaken(self) -> bool:
        """Whether another writer changed the object at the same time. The request can be retried."""
        return self.status == 409 and self.message.endswith(_CONFLICTING_WRITE)

    @property
    def lacks_kind(self) -> bool:
        """Whether a create failed because the cluster lacks the kind. A missing namespace has the same status."""
        return self.status == 404 and "namespaces " not in self.message


class Page(NamedTuple):
    """One page of a list."""

    objects: list[Manifest] | None
    """None if the page is too large to parse: request fewer objects."""
    size: int
    """Bytes of the response, or the bytes read before it was cut off as too large."""
    token: str = ""
    """Token of the next page; empty after the last one."""
    version: str = ""
    """resourceVersion of the whole list, to watch from."""


class KubeApi:
    """Requests to one API server. Every method raises ApiError."""

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        self._login = login
        self._session: aiohttp.ClientSession | None = None
        self._server = ""
        self._logins = asyncio.Lock()
        self.on_write: Callable[[str, str, str, float], None] = lambda kind, verb, code, seconds: None
        """Called after every write with kind, verb, HTTP status (`2xx` for success, `none` without an answer), seconds."""

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def find(self, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._call("GET", KINDS[kind].path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, body: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object, or only validate it with `dry_run`. Raises status 409 if the name is taken."""
        verb, query = ("dry-run", {"dryRun": "All"}) if dry_run else ("create", None)
        return await self._write(
            verb, "POST", body["kind"], body["metadata"].get("namespace", ""), body=body, query=query
        )

    async def replace(self, body: Manifest) -> Manifest:
        """Replace an object. Raises status 409 if the object has changed since the body's resourceVersion."""
        metadata = body["metadata"]
        return await self._write(
            "update", "PUT", body["kind"], metadata.get("namespace", ""), metadata["name"], body=body
        )

    async def merge(self, kind: str, namespace: str, name: str, change: Manifest) -> Manifest:
        return await self._write(
            "patch", "PATCH", kind, namespace, name, body=change, form="application/merge-patch+json"
        )

    async def set_pod_condition(self, namespace: str, name: str, uid: str, condition: Manifest) -> Manifest:
        """Set one condition of a pod. Raises status 409 if the pod's uid differs."""
        # Conditions are merged by their type.
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        form = "application/strategic-merge-patch+json"
        return await self._write("patch-status", "PATCH", "Pod", namespace, name, "status", body=body, form=form)

    async def apply_status(self, obj: Manifest, kind: str, status: Manifest, manager: str) -> Manifest:
        """Server-side apply `manager`'s part of a status. Raises status 409 if the object's uid or version differs: the
        network may deliver a write long after this replica has lost the lease.
        """
        metadata = {key: obj["metadata"][key] for key in ("namespace", "name", "uid", "resourceVersion")}
        body = {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata, "status": status}
        place, query = (metadata["namespace"], metadata["name"], "status"), {"fieldManager": manager, "force": "true"}
        return await self._write("apply-status", "PATCH", kind, *place, body=body, query=query, form=APPLY_TYPE)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        *,
        foreground: bool = False,
    ) -> Manifest:
        """Delete an object, and its dependents after it or (`foreground`) before it.

        Raises status 404 if it does not exist, 409 if its uid differs.
        """
        policy = "Foreground" if foreground else "Background"
        body: dict[str, Any] = {"propagationPolicy": policy, "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._write("delete", "DELETE", kind, namespace, name, body=body)

    async def page(self, kind: str, namespace: str, selector: str, limit: int, token: str) -> "Page":
        """Return at most `limit` objects of a kind, starting at `token` (empty: the first page)."""
        query = {"limit": str(limit)} | ({"labelSelector": selector} if selector else {})
        query |= {"continue": token} if token else {}
        url, timeout = f"{KINDS[kind].path(namespace)}?{urlencode(query)}", aiohttp.ClientTimeout(total=LIST_SECONDS)
        body = bytearray()
        async with _as_api_errors(), await self._send("GET", url, timeout=timeout) as response:
            async for chunk in response.content.iter_any():
                body += chunk
                if limit > 1 and len(body) > MOST_PAGE_BYTES:
                    return Page(None, len(body))
            answer = read_json(bytes(body))
        metadata = answer["metadata"]
        return Page(answer["items"], len(body), metadata.get("continue") or "", metadata["resourceVersion"])

    async def watch(
        self, kind: str, namespace: str, selector: str, version: str
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield (type, object) for each change after a resourceVersion, bookmarks included, until the server ends the
        watch.

        Raises status 410 if the version is too old; the objects must then be listed again.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(WATCH_SECONDS)} | ({"labelSelector": selector} if selector else {})
        url = f"{KINDS[kind].path(namespace)}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=WRITE_SECONDS, sock_read=SILENCE_SECONDS)
        async with _as_api_errors(), await self._send("GET", url, timeout=timeout) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = read_json(line)
                    if event["type"] == "ERROR":
                        raise ApiError(
                            event["object"].get("code") or 500, event["object"].get("message") or "watch error"
                        )
                    yield event["type"], event["object"]

    async def _write(
        self,
        verb: str,
        method: str,
        kind: str,
        *place: str,
        body: Manifest,
        query: Mapping[str, str] | None = None,
        form: str = "application/json",
    ) -> dict[str, Any]:
        """Send one write. `place` is namespace, name and subresource; `form` is the content type of the body."""
        began, code = time.monotonic(), "none"
        try:
            answer = await self._call(method, KINDS[kind].path(*place), query, body, form)
            code = "2xx"
            return answer
        except ApiError as error:
            code = str(error.status or code)
            raise
        finally:
            self.on_write(kind, verb, code, time.monotonic() - began)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        url = f"{path}?{urlencode(query)}" if query else path
        data = None
        if body is not None:
            is_apply = content_type == APPLY_TYPE
            data = apply_body(body) if is_apply else json.dumps(body, separators=(",", ":")).encode()
        timeout = aiohttp.ClientTimeout(total=WRITE_SECONDS)
        async with _as_api_errors(), await self._send(method, url, data, content_type, timeout) as response:
            answer: dict[str, Any] = read_json(await response.read())
            return answer

    async def _send(
        self,
        method: str,
        url: str,
        data: bytes | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """Return a successful response. Logs in again once if the credentials have expired."""
        session = await self._connect()
        for first in (True, False):
            headers = {"Content-Type": content_type} if data is not None else {}
            asked = datetime.now(UTC)
            response = await session.request(method, self._server + url, data=data, headers=headers, timeout=timeout)
            clock.learn_from(response.headers.get("Date"), asked)
            if response.status < 400:
                return response
            async with response:
                if response.status == 401 and first:
                    session = await self._connect(instead_of=session)
                    continue
                raise await _error(response)
        raise AssertionError("unreachable")

    async def _connect(self, instead_of: aiohttp.ClientSession | None = None) -> aiohttp.ClientSession:
        async with self._logins:
            if self._session is None or self._session is instead_of:
                info = self._login()
                connector = aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context())
                headers = {
                    **info.as_http_headers(),
                    "Accept": "application/json",
                    "User-Agent": "agent-rollouts-operator",
                }
                old, self._server = self._session, info.server.rstrip("/")
                self._session = aiohttp.ClientSession(connector=connector, headers=headers, proxy=info.proxy_url)
                if old:  # Watches on the old session end, and the informers restart them.
                    await old.close()
            return self._session


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    text = await response.text()
    message = text[:500]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = json.loads(text)["message"]
    try:
        retry_after = min(LONGEST_RETRY_SECONDS, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        retry_after = 1.0
    return ApiError(response.status, message or response.reason or "no message", retry_after)


@contextlib.asynccontextmanager
async def _as_api_errors() -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ApiError(UNREACHABLE, "the API server did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(UNREACHABLE, f"the API server cannot be reached: {error}") from error
    except json.JSONDecodeError as error:
        raise ApiError(UNREACHABLE, "the API server's answer was cut off") from error

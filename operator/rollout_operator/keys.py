"""Keys of jobs and model servers. Each is stored in a Secret, read once, and kept in memory while its owner exists."""

import base64
import binascii
import re
import secrets
from collections.abc import Callable
from typing import Final

from rollout_api.cluster import KEY_FILE
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.cache import controller_of

CONFLICT = 409
INVALID = 422
KEY: Final = re.compile(rb"[0-9a-f]{64}")
"""A valid key. Tenants may change Secrets in their namespaces, and keys stay in memory, so nothing longer is kept."""

SUSPEND: Final = (
    "Suspend and resume the RolloutJob, and the operator creates the Secret with a new key. If it does not, the chart's "
    "defaults have changed; then create the RolloutJob again"
)


class KeyRing:
    """Keys by the uid of their Secret's controller. Each has 64 hexadecimal digits."""

    def __init__(self, api: KubeApi, new_key: Callable[[], str] = lambda: secrets.token_hex(32)) -> None:
        self._api = api
        self._new_key = new_key
        self.known: dict[str, str] = {}

    async def ensure(self, body: Manifest, field: str = KEY_FILE, remedy: str | None = None) -> None:
        """Create the Secret with its owner's key, or read the key of an existing one. A new key is random unless one is
        known; with a `remedy` (see EnsureKey), an unknown key is only read.
        """
        owner = controller_of(body)
        if owner is None:
            raise ValueError(
                f"Secret {body['metadata']['name']}: has no owner reference to a controller, so nothing would delete it"
            )
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        known = self.known.get(owner["uid"])
        if known is None and remedy is not None:
            return await self.read(namespace, name, owner["uid"], field, remedy)
        key = known or self._new_key()
        try:
            await self._api.create({**body, "stringData": {**body.get("stringData", {}), field: key}})
        except ApiError:
            if await self._api.find("Secret", namespace, name) is None:
                raise
            await self.read(namespace, name, owner["uid"], field)
        else:
            self.known[owner["uid"]] = key

    async def read(
        self, namespace: str, name: str, owner_uid: str, field: str = KEY_FILE, remedy: str = SUSPEND
    ) -> None:
        """Read the key of a Secret that this owner controls. Raises ApiError, with status 404 and the `remedy` if it is
        missing, 422 if it is not a key.
        """
        secret = await self._api.find("Secret", namespace, name)
        if secret is None:
            raise ApiError(
                404, f"Secret {namespace}/{name} is missing; it has the key by which running pods are reached. {remedy}"
            )
        check_owner(secret, "Secret", owner_uid)
        encoded = (secret.get("data") or {}).get(field, "")
        if not encoded:
            raise ApiError(
                404, f"Secret {namespace}/{name} has no field {field}; delete it with its owner and create both again"
            )
        try:
            key = base64.b64decode(encoded)
        except binascii.Error:
            key = b""
        if not KEY.fullmatch(key):
            raise ApiError(
                INVALID,
                f"Secret {namespace}/{name}: field {field} has {len(key)} bytes that are not a key; expected 64 hexadecimal "
                "digits in lower case. Delete the Secret with its owner and create both again",
            )
        self.known[owner_uid] = key.decode()

    def forget(self, owner_uid: str) -> None:
        self.known.pop(owner_uid, None)


def check_owner(found: Manifest, kind: str, owner_uid: str) -> None:
    """Raise ApiError with status 409 unless the object has that controller. It may still belong to an earlier object with
    the same name.
    """
    owner = controller_of(found)
    if owner is None or owner["uid"] != owner_uid:
        metadata = found["metadata"]
        whose = f"belongs to {owner['kind']} {owner['name']} (uid {owner['uid']})" if owner else "has no owner"
        raise ApiError(
            CONFLICT,
            f"{kind} {metadata['namespace']}/{metadata['name']} exists already and {whose}; waiting until it is deleted. "
            "If it remains, delete it or choose another name",
        )

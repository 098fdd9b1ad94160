"""Keys of jobs and model servers. Each is in a Secret, is read at most once, and stays in memory while its owner
exists.
"""

import base64
import secrets
from collections.abc import Callable

from rollout_api.cluster import KEY_FILE
from rollout_api.on_cluster.objects import Manifest
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.cache import controller_of

CONFLICT = 409


class KeyRing:
    """Keys by the uid of their Secret's controller. Each has 64 hexadecimal digits."""

    def __init__(self, api: KubeApi, new_key: Callable[[], str] = lambda: secrets.token_hex(32)) -> None:
        self._api = api
        self._new_key = new_key
        self.known: dict[str, str] = {}

    async def ensure(self, body: Manifest, field: str = KEY_FILE) -> bool:
        """Create the Secret with its owner's key, or read the key of an existing one. A new key is random unless one is
        known.

        Returns whether the key was learned or changed.
        """
        owner = controller_of(body)
        if owner is None:
            raise ValueError(f"Secret {body['metadata']['name']}: has no controller; a key must go when its owner goes")
        before = self.known.get(owner["uid"])
        key = before or self._new_key()
        try:
            await self._api.create({**body, "stringData": {**body.get("stringData", {}), field: key}})
        except ApiError:
            namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
            if await self._api.find("Secret", namespace, name) is None:
                raise
            return await self.read(namespace, name, owner["uid"], field)
        self.known[owner["uid"]] = key
        return before is None

    async def read(self, namespace: str, name: str, owner_uid: str, field: str = KEY_FILE) -> bool:
        """Read the key of a Secret that this owner controls. Returns whether it was learned or changed."""
        secret = await self._api.find("Secret", namespace, name)
        if secret is None:
            raise ApiError(
                404,
                f"Secret {namespace}/{name} is missing; it holds the job and the key of its running sandboxes. Suspend the "
                "RolloutJob and resume it: the operator then creates the Secret with a new key. If it does not, the chart's "
                "defaults have changed: create the RolloutJob again",
            )
        check_owner(secret, "Secret", owner_uid)
        encoded = (secret.get("data") or {}).get(field, "")
        if not encoded:
            raise ApiError(
                404, f"Secret {namespace}/{name} has no field {field}; delete it with its owner and create both again"
            )
        before, self.known[owner_uid] = self.known.get(owner_uid), base64.b64decode(encoded).decode()
        return self.known[owner_uid] != before

    def forget(self, owner_uid: str) -> None:
        self.known.pop(owner_uid, None)


def check_owner(found: Manifest, kind: str, owner_uid: str) -> None:
    """Raise ApiError with status 409 unless the object has that controller. The dependents of an earlier object with
    the same name may not be deleted yet.
    """
    owner = controller_of(found)
    if owner is None or owner["uid"] != owner_uid:
        metadata = found["metadata"]
        whose = f"{owner['kind']} {owner['name']} (uid {owner['uid']})" if owner else "nobody"
        raise ApiError(
            CONFLICT,
            f"{kind} {metadata['namespace']}/{metadata['name']} exists and belongs to {whose}; waiting for it to go. "
            "If it stays, delete it or choose another name",
        )

"""Keeps the nftables ruleset of one node equal to the cluster's NetworkPolicies; a program that runs on the node."""

import argparse
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from .api import Api, ApiError
from .network_policy import Pod, isolate, parse_pod, ruleset

# Length of one watch. The collection is listed again afterwards, so that no event is missed for longer than that.
WATCH_SECONDS = 300
RETRY_SECONDS = 0.5
# Pods are often created and deleted many at a time; one ruleset covers all of them.
BURST_SECONDS = 0.005

NAMESPACES = "/api/v1/namespaces"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"


class Mirror:
    """The last known state of collections of the API; each collection is watched by its own thread."""

    def __init__(self, api: Api, collections: list[tuple[str, str]]) -> None:
        """Each of `collections` is a path and a field selector."""
        self.changed = threading.Event()
        self._api = api
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], dict[str, Any] | None] = dict.fromkeys(collections)
        for collection in collections:
            threading.Thread(target=self._follow, args=(collection,), daemon=True).start()

    def snapshot(self) -> dict[str, list[Any]] | None:
        """Returns objects by path; None until every collection has been listed."""
        with self._lock:
            found: dict[str, list[Any]] = {}
            for (path, _), objects in self._objects.items():
                if objects is None:
                    return None
                found.setdefault(path, []).extend(objects.values())
            return found

    def _follow(self, collection: tuple[str, str]) -> None:
        path, selector = collection
        query = {"fieldSelector": selector}
        while True:
            try:
                listed = self._api.request("GET", f"{path}?fieldSelector={selector}")
                with self._lock:
                    self._objects[collection] = {item["metadata"]["uid"]: item for item in listed["items"] or []}
                self.changed.set()
                version = listed["metadata"]["resourceVersion"]
                for event in self._api.watch(path, query | {"resourceVersion": version}, WATCH_SECONDS):
                    self._take(collection, event)
            except (OSError, ApiError) as error:
                # The rules do not change while the API server is unavailable.
                print(f"{path}: {error}", flush=True)
                time.sleep(RETRY_SECONDS)

    def _take(self, collection: tuple[str, str], event: dict[str, Any]) -> None:
        item = event["object"]
        with self._lock:
            objects = self._objects[collection]
            assert objects is not None
            if event["type"] == "DELETED":
                objects.pop(item["metadata"]["uid"], None)
            else:
                objects[item["metadata"]["uid"]] = item
        self.changed.set()


def rules_for(snapshot: dict[str, list[Any]], pods_path: str) -> str:
    """Returns the ruleset for the API's current objects."""
    pods: list[Pod] = [pod for item in snapshot[pods_path] if (pod := parse_pod(item)) is not None]
    namespaces = {item["metadata"]["name"]: item["metadata"].get("labels", {}) for item in snapshot[NAMESPACES]}
    return ruleset(isolate(snapshot[POLICIES], pods, namespaces))


def main() -> None:
    """Applies rulesets until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="URL of the API server")
    parser.add_argument("--pki", required=True, type=Path, help="folder of the certificates")
    parser.add_argument("--nodes", required=True, nargs="+", help="nodes whose pods are real")
    arguments = parser.parse_args()
    pods_path = "/api/v1/pods"
    # Only pods of these nodes, so that thousands of pods on simulated nodes are not parsed for nothing.
    pods = [(pods_path, f"spec.nodeName={name}") for name in arguments.nodes]
    api = Api(arguments.server, arguments.pki, "network-policy")
    mirror = Mirror(api, [*pods, (NAMESPACES, ""), (POLICIES, "")])
    applied = ""
    while mirror.changed.wait():
        time.sleep(BURST_SECONDS)
        mirror.changed.clear()
        snapshot = mirror.snapshot()
        rules = rules_for(snapshot, pods_path) if snapshot is not None else applied
        if rules != applied:
            done = subprocess.run(["nft", "-f", "-"], input=rules, text=True, capture_output=True, check=False)
            if done.returncode == 0:
                applied = rules
            else:
                # The last accepted ruleset stays in effect; the next change tries again.
                print(f"nft refused the ruleset:\n{done.stderr}\n{rules}", flush=True)
                time.sleep(RETRY_SECONDS)
                mirror.changed.set()


if __name__ == "__main__":
    main()

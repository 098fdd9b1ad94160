"""A runner's knowledge of its Sandboxes, whatever a watch loses, repeats or reports late."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.cluster.sandbox_object import SandboxView, sandbox_view
from agent_runtime.sandboxes.cluster.watch import SandboxViews


def sandbox(name: str, version: int, reason: str | None = None) -> dict[str, Any]:
    conditions = [{"type": "Finished", "status": "True", "reason": reason, "message": ""}] if reason else []
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": conditions}}


class Server:
    """Sandboxes with their history, as the API server keeps them."""

    def __init__(self) -> None:
        self.version, self.there, self.history = 0, dict[str, dict[str, Any]](), list[dict[str, Any]]()

    def change(self, name: str, reason: str | None) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.there else "ADDED"
        self.there[name] = sandbox(name, self.version, reason)
        self.history.append({"type": kind, "object": self.there[name]})

    def delete(self, name: str) -> None:
        if name in self.there:
            self.version += 1
            del self.there[name]
            self.history.append({"type": "DELETED", "object": sandbox(name, self.version)})

    def since(self, version: str) -> list[dict[str, Any]]:
        return [event for event in self.history if int(event["object"]["metadata"]["resourceVersion"]) > int(version)]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["change", "finish", "delete", "watch", "bookmark", "list"]), st.sampled_from("abc")),
    max_size=40,
)


@given(CHANGES)
def test_every_end_of_a_sandbox_is_reported_once(changes: list[tuple[str, str]]) -> None:
    server, told = Server(), dict[str, SandboxView | None]()

    def changed(name: str, view: SandboxView | None) -> None:
        assert told.get(name) != view
        told[name] = view

    known = SandboxViews(changed)
    known.set([], "0")
    for what, name in [*changes, ("watch", "")]:
        match what:
            case "change" | "finish":
                server.change(name, "Evicted" if what == "finish" else None)
            case "delete":
                server.delete(name)
            case "watch":
                for event in server.since(known.resource_version):
                    known.apply(event)
            case "bookmark":
                for event in server.since(known.resource_version):
                    known.apply(event)
                known.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(server.version)}}})
            case "list":
                known.set(server.there.values(), str(server.version))
    assert known.views == {name: sandbox_view(one) for name, one in server.there.items()}
    assert {name: view for name, view in told.items() if view is not None} == known.views

"""The checks of `rolloutctl doctor --cluster`: functions from responses of the API server to findings. No side effects."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import yaml
from pydantic import ValidationError

from rollout_api.manifest import Problem
from rollout_api.on_cluster.nodes import NodeCounts, has_image_volumes, has_user_namespaces, is_ready, runtime
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.on_cluster.sandbox_pod import choose_mode
from rollout_api.sandbox import WorkspaceMode

OLDEST: Final = (1, 33)
"""First Kubernetes with user namespaces and image volumes both on by default."""

PLAIN_USER: Final = "1000"
"""A user other than root, for the check of pods with `sandbox.user`."""

RESOURCES: Final = ("rolloutjobs", "rolloutshards", "sandboxes", "modelservers")

LEASE_SLACK: Final = timedelta(seconds=30)
"""Tolerance for different clocks of this machine and the operator's node."""

POLICY_ENGINES: Final = ("antrea", "calico", "canal", "cilium", "kindnet", "kube-router", "ovnkube", "weave")
"""Parts of DaemonSet names of network add-ons that enforce NetworkPolicies."""

Right = tuple[str, str, str, str, str]
"""Verb, API group, resource, subresource, and why a user needs it."""

RIGHTS: Final[tuple[Right, ...]] = (
    ("create", "rollout.dev", "rolloutjobs", "", "apply jobs"),
    ("list", "rollout.dev", "rolloutjobs", "", "see jobs"),
    ("patch", "rollout.dev", "rolloutjobs", "", "suspend and resume jobs"),
    ("delete", "rollout.dev", "rolloutjobs", "", "cancel jobs"),
    ("get", "rollout.dev", "sandboxes", "", "see sandboxes"),
    ("get", "", "pods", "log", "read the log of a runner"),
    ("create", "", "pods", "portforward", "use rolloutctl sandbox"),
)
"""Without the first right, nothing works."""


class State(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output."""

    state: State
    subject: str
    message: str
    advice: str = ""


@dataclass(frozen=True)
class Refusal:
    """An error response of the API server."""

    status: int
    message: str

    @property
    def not_allowed(self) -> bool:
        """Whether the user lacks the right, so that the check has no result."""
        # Refusals by admission also have status 403, but do not name the user.
        return self.status == 401 or (self.status == 403 and "cannot" in self.message and "User" in self.message)


Answer = Mapping[str, Any] | Refusal


def _ok(subject: str, message: str) -> Finding:
    return Finding(State.OK, subject, message)


def _unknown(subject: str, what: str, refusal: Refusal) -> Finding:
    if refusal.not_allowed:
        return Finding(State.WARN, subject, f"you may not read {what}", "ask the cluster's administrator")
    return Finding(State.WARN, subject, f"{what} cannot be read: {refusal.message}")


def version(answer: Answer) -> Finding:
    if isinstance(answer, Refusal):
        return Finding(
            State.FAIL, "Kubernetes", f"does not respond: {answer.message}", "check KUBECONFIG and its context"
        )
    found = answer.get("gitVersion", "unknown")
    numbers = tuple(int(re.sub(r"\D", "", answer.get(part, "0")) or 0) for part in ("major", "minor"))
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Finding(State.FAIL, "Kubernetes", f"{found} is too old", f"upgrade the cluster to {oldest} or newer")
    return _ok("Kubernetes", found)


def definitions(answers: Mapping[str, Answer]) -> Finding:
    subject, advice = "resources", "install or upgrade the chart: docs/installing.md"
    for plural, answer in answers.items():
        if isinstance(answer, Refusal):
            if answer.status == 404:
                return Finding(State.FAIL, subject, f"{plural}.rollout.dev is not installed", advice)
            return _unknown(subject, f"{plural}.rollout.dev", answer)
        conditions = {c["type"]: c for c in answer.get("status", {}).get("conditions", ())}
        established = conditions.get("Established", {})
        if established.get("status") != "True":
            why = established.get("message") or conditions.get("NamesAccepted", {}).get("message", "")
            return Finding(State.FAIL, subject, f"{plural}.rollout.dev is not established: {why}", advice)
    return _ok(subject, f"{', '.join(answers)} are installed")


def config_of(config_map: Answer) -> OperatorConfig | None:
    """Return the operator's configuration in a ConfigMap; None if it cannot be read or parsed."""
    if isinstance(config_map, Refusal):
        return None
    for text in config_map.get("data", {}).values():
        try:
            return OperatorConfig.model_validate(yaml.safe_load(text))
        except (yaml.YAMLError, ValidationError):
            continue
    return None


def operator(
    deployments: Answer, config: OperatorConfig | None, lease: Answer, namespace: str, now: datetime
) -> list[Finding]:
    """Check whether an operator runs, whether one of its replicas leads, and whether it watches this namespace."""
    subject = "operator"
    if isinstance(deployments, Refusal):
        return [_unknown(subject, "the operator's Deployment", deployments)]
    if not deployments["items"]:
        return [Finding(State.FAIL, subject, "is not installed", "helm install: docs/installing.md")]
    if len(deployments["items"]) > 1:
        places = ", ".join(sorted(d["metadata"]["namespace"] for d in deployments["items"]))
        advice = "remove all but one, or give each its own watch.namespaces"
        found = [Finding(State.WARN, subject, f"is installed {len(deployments['items'])} times: {places}", advice)]
    else:
        found = []
    deployment = deployments["items"][0]
    name, place = deployment["metadata"]["name"], deployment["metadata"]["namespace"]
    ready = deployment.get("status", {}).get("readyReplicas", 0)
    if not ready:
        advice = f"kubectl describe pods -n {place} -l app.kubernetes.io/instance={name}"
        return [*found, Finding(State.FAIL, subject, f"{place}/{name} has no ready pod", advice)]
    found.append(_ok(subject, f"{place}/{name}: {ready} of {deployment['spec'].get('replicas', 1)} pods ready"))
    found.append(_leader(lease, place, name, now))
    if config is not None and config.watch.namespaces and namespace not in config.watch.namespaces:
        watched = ", ".join(config.watch.namespaces)
        advice = f"use one of those, or add {namespace} to the chart's watch.namespaces"
        found.append(Finding(State.FAIL, subject, f"watches only namespaces {watched}, not {namespace}", advice))
    return found


def _leader(lease: Answer, place: str, name: str, now: datetime) -> Finding:
    subject, advice = "leader", f"read the operator's log: kubectl logs -n {place} deployment/{name}"
    if isinstance(lease, Refusal):
        if lease.status == 404:
            return Finding(State.FAIL, subject, "no replica has ever taken the lease", advice)
        return _unknown(subject, "the operator's lease", lease)
    spec = lease.get("spec", {})
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        return Finding(State.FAIL, subject, "no replica holds the lease", advice)
    age = now - datetime.fromisoformat(renewed)
    if age > timedelta(seconds=spec.get("leaseDurationSeconds", 15)) + LEASE_SLACK:
        message = f"{holder} holds the lease and has not renewed it for {age.total_seconds():.0f} s"
        return Finding(State.FAIL, subject, message, advice)
    return _ok(subject, f"{holder} holds the lease")


def nodes(answer: Answer) -> Iterator[Finding]:
    if isinstance(answer, Refusal):
        yield _unknown("nodes", "the nodes", answer)
        return
    known = [node for node in answer["items"] if _is_usable(node)]
    counts = NodeCounts()
    for node in known:
        counts.add(node)
    if not known:
        yield Finding(State.FAIL, "nodes", "no node is ready and free of taints", "kubectl get nodes")
        return
    choice = choose_mode(WorkspaceMode.AUTO, counts)
    if choice.mode is WorkspaceMode.PLAIN:
        advice = "jobs run with one pod for each rollout; for Overlay, upgrade the nodes"
        yield Finding(State.WARN, "Overlay", choice.message, advice)
    else:
        yield _overlay_nodes(known)
    runtimes = ", ".join(sorted({runtime(node) for node in known}))
    if all(map(has_image_volumes, answer["items"])):
        yield _ok("image volumes", f"the executor's image is mounted ({runtimes})")
    else:
        message = f"not supported by all nodes ({runtimes}); an init container copies the executor, which takes longer"
        yield Finding(State.WARN, "image volumes", message, "upgrade to containerd 2.1 or CRI-O 1.31, or newer")


def _overlay_nodes(known: Sequence[Mapping[str, Any]]) -> Finding:
    names = {node["metadata"]["name"]: runtime(node) for node in known if not has_user_namespaces(node, "")}
    if not names:
        one = f"node {known[0]['metadata']['name']} supports it"
        return _ok("Overlay", f"all {len(known)} nodes support it" if len(known) > 1 else one)
    listed = ", ".join(f"{name} ({version})" for name, version in list(names.items())[:5])
    listed += ", …" if len(names) > 5 else ""
    message = f"{len(known) - len(names)} of {len(known)} nodes support it; these lack user namespaces: {listed}"
    return Finding(State.WARN, "Overlay", message, "sandboxes run on the other nodes; upgrade these to use them too")


def _is_usable(node: Mapping[str, Any]) -> bool:
    """Whether a pod without tolerations can be scheduled on a node. Taints for node conditions are ignored as temporary."""
    blocking = (
        taint
        for taint in node["spec"].get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule" and not taint.get("key", "").startswith("node.kubernetes.io/")
    )
    is_linux = (node["metadata"].get("labels") or {}).get("kubernetes.io/os", "linux") == "linux"
    return is_ready(node) and is_linux and not node["spec"].get("unschedulable") and not any(blocking)


def admission(namespace: Answer, overlay: Answer, plain: Answer, plain_as_user: Answer) -> Iterator[Finding]:
    """Interpret dry runs of sandbox pods. The last one runs as PLAIN_USER."""
    subject = "admission"
    if isinstance(namespace, Refusal) and namespace.status == 404:
        advice = "kubectl create namespace, or choose another with -n"
        yield Finding(State.FAIL, subject, "the namespace does not exist", advice)
        return
    level = "unknown"
    if not isinstance(namespace, Refusal):
        level = namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "not set")
    if isinstance(plain_as_user, Refusal):
        if plain_as_user.not_allowed:
            yield _unknown(subject, f"whether sandbox pods are admitted (Pod Security: {level})", plain_as_user)
        else:
            advice = "choose another namespace: no sandbox can run in this one"
            yield Finding(State.FAIL, subject, f"sandbox pods are refused: {plain_as_user.message}", advice)
        return
    if isinstance(plain, Refusal):
        advice = (
            f'set sandbox.user to a number, such as "{PLAIN_USER}" (Kubernetes cannot check names), and '
            "sandbox.workingDir to a folder that this user may create or write to, such as /tmp/workspace"
        )
        message = f"Plain sandbox pods without a numeric user are refused: {plain.message}"
        yield Finding(State.WARN, subject, message, advice)
    if isinstance(overlay, Refusal):
        advice = (
            "jobs run in Plain mode here, with one pod for each rollout; "
            "Overlay needs label pod-security.kubernetes.io/enforce=privileged"
        )
        yield Finding(State.WARN, subject, f"Overlay sandbox pods are refused: {overlay.message}", advice)
    if not isinstance(plain, Refusal) and not isinstance(overlay, Refusal):
        yield _ok(subject, f"Overlay and Plain sandbox pods are admitted (Pod Security: {level})")


def isolation(daemon_sets: Answer) -> Finding:
    """Check whether NetworkPolicies are enforced. The API server accepts them either way."""
    subject, advice = (
        "network policies",
        "without enforcement, sandboxes can connect to the whole network; ask the cluster's administrator",
    )
    if isinstance(daemon_sets, Refusal):
        return _unknown(subject, "the DaemonSets that enforce them", daemon_sets)
    names = sorted({d["metadata"]["name"] for d in daemon_sets["items"]})
    engines = [name for name in names if any(engine in name for engine in POLICY_ENGINES)]
    if engines:
        return _ok(subject, f"{', '.join(engines)} is installed, which enforces them by default")
    return Finding(State.WARN, subject, "no known add-on that enforces them was found", advice)


def job(problems: Sequence[Problem], *, is_config_known: bool) -> Iterator[Finding]:
    """Return the problems for which the operator would set the condition Invalid. If its configuration cannot be read, they
    are warnings, because the chart's defaults may solve them.
    """
    for problem in problems:
        if is_config_known:
            yield Finding(
                State.FAIL, "job", str(problem), "docs/jobs-on-a-cluster.md lists the differences from a laptop"
            )
        else:
            advice = "the chart's defaults may set it, but you may not read them"
            yield Finding(State.WARN, "job", str(problem), advice)
    if not problems:
        yield _ok("job", "it can be started")


def secrets(answers: Mapping[str, tuple[str, Answer]], namespace: str) -> Iterator[Finding]:
    for name, (field, answer) in answers.items():
        if not isinstance(answer, Refusal):
            yield _ok("secret", f"{name} exists ({field})")
        elif answer.status == 404:
            advice = f"kubectl -n {namespace} create secret generic {name} --from-env-file=FILE"
            yield Finding(State.FAIL, "secret", f"{name}, which {field} names, does not exist", advice)
        else:
            yield _unknown("secret", f"{name} ({field})", answer)


def rights(allowed: Mapping[Right, bool]) -> Iterator[Finding]:
    missing = [right for right, granted in allowed.items() if not granted]
    for verb, _, resource, subresource, purpose in missing:
        state = State.FAIL if (verb, resource) == ("create", "rolloutjobs") else State.WARN
        what = f"{resource}/{subresource}" if subresource else resource
        yield Finding(state, "your rights", f"you may not {verb} {what}, to {purpose}", "ask for the role `edit` here")
    if not missing:
        yield _ok("your rights", "all required rights are granted")


def running(sandboxes: Answer) -> Iterator[Finding]:
    """Summarise why Sandboxes of the namespace run in Plain mode or do not start, by their conditions."""
    if isinstance(sandboxes, Refusal):
        return
    reasons: dict[tuple[str, str, str], int] = {}
    for sandbox in sandboxes["items"]:
        for condition in sandbox.get("status", {}).get("conditions", ()):
            cause = (condition["type"], condition["reason"], condition.get("message", ""))
            if condition["status"] == "False" and cause[:2] != ("Overlay", "NotAsked") and condition["type"] != "Ready":
                reasons[cause] = reasons.get(cause, 0) + 1
    for (kind, reason, message), count in sorted(reasons.items()):
        what = "run in Plain mode" if kind == "Overlay" else f"are not {kind}"
        yield Finding(State.WARN, "sandboxes", f"{count} {what}: {reason}: {message}", "kubectl describe sandbox")

"""How a pod is created, in which order, and what follows a refusal."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollout_api.sandbox import SandboxSpec
from rollout_operator.actions import Create, EnsureKey, ReadKey, Remember
from rollout_operator.sandbox import observe
from rollout_operator.sandbox.making import Invalid, learned_refusals, make_pod
from rollout_operator.sandbox.observe import VARIANTS, image_volumes_refused, overlay_refused, pod_refused
from rollout_operator.world import Memory, World, operator_peer
from tests.unit.rollout_operator.sandbox.objects import NOW, RUNNING, Json, node, pod, rollout_job, sandbox, world


def make(where: World, asked: Json) -> Any:
    seen = observe(where, asked)
    assert isinstance(seen.spec, SandboxSpec)
    return make_pod(seen, seen.spec)


def pod_of(actions: tuple[Any, ...]) -> Json:
    return dict(actions[-1].body)


def refused(*variants: tuple[Any, bool], words: str = "violates PodSecurity") -> Memory:
    memory = Memory()
    for variant in variants:
        memory.learn(Remember(pod_refused("uid-s", variant), words, 60), NOW.timestamp())
    return memory


def way(made: tuple[Any, ...]) -> tuple[str, str]:
    spec = pod_of(made)["spec"]
    return "Overlay" if spec.get("hostUsers") is False else "Plain", "copied" if "initContainers" in spec else "volume"


def test_network_policy_precedes_the_pod_and_is_shared() -> None:
    policy, created = make(world(node(), rollout_job()), sandbox(job="j"))
    assert (policy.body["kind"], created.body["kind"]) == ("NetworkPolicy", "Pod")
    assert policy.ref.name == f"j-net-{created.body['metadata']['labels']['rollout.dev/network']}"
    assert policy.body["metadata"]["ownerReferences"][0]["uid"] == "uid-j"
    assert [action.ref.kind for action in make(world(node(), rollout_job(), policy.body), sandbox(job="j"))] == ["Pod"]


def test_the_policy_selects_the_pod_that_needs_it_and_admits_its_jobs_runners() -> None:
    policy, created = make(world(node(), rollout_job()), sandbox(job="j"))
    labels = created.body["metadata"]["labels"]
    assert policy.body["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (source,) = policy.body["spec"]["ingress"][0]["from"]
    assert source == {"podSelector": {"matchLabels": {"rollout.dev/job-uid": "uid-j", "rollout.dev/role": "runner"}}}


def test_nothing_is_created_before_the_key_is_known() -> None:
    assert make(world(node(), rollout_job(), keys={}), sandbox(job="j")) == (
        ReadKey(observe(world(rollout_job()), sandbox(job="j")).key_secret, "uid-j"),
    )
    (action,) = make(world(node(), keys={}), sandbox())
    assert isinstance(action, EnsureKey)
    assert action.body["metadata"]["name"] == "s-sandbox"
    assert action.body["metadata"]["ownerReferences"][0]["uid"] == "uid-s"


def test_a_sandbox_by_hand_admits_the_pods_that_it_names() -> None:
    selector = {"matchLabels": {"app": "notebook"}}
    policy, created = make(world(node()), sandbox(clients=selector))
    assert policy.body["spec"]["ingress"][0]["from"] == [{"podSelector": selector}]
    assert policy.body["spec"]["podSelector"]["matchLabels"].items() <= created.body["metadata"]["labels"].items()


def test_sandbox_that_can_be_parked_admits_the_operator_and_the_pods_of_its_own_parking_jobs() -> None:
    policy, _ = make(world(node()), sandbox(parking={"uri": "s3://bucket/prefix"}))
    labels = {"rollout.dev/role": "parking", "rollout.dev/sandbox": "s"}
    jobs, operator = policy.body["spec"]["ingress"][0]["from"]
    assert (jobs, operator) == ({"podSelector": {"matchLabels": labels}}, operator_peer(world(node()).config))


def test_every_mode_is_tried_in_order_and_the_last_refusal_is_reported() -> None:
    tried: list[tuple[Any, bool]] = []
    for expected in [("Overlay", "volume"), ("Overlay", "copied"), ("Plain", "volume"), ("Plain", "copied")]:
        made = make(world(node(), memory=refused(*tried)), sandbox())
        assert way(made) == expected
        create = made[-1]
        assert isinstance(create, Create)
        assert create.if_refused is not None
        tried = [
            variant
            for variant in VARIANTS
            if pod_refused("uid-s", variant) == create.if_refused.fact or variant in tried
        ]
    told = make(world(node(), memory=refused(*tried, words="runAsNonRoot != true")), sandbox())
    assert isinstance(told, Invalid)
    assert told.message == "the API server refused its pod: runAsNonRoot != true; set spec.user to a uid such as 1000"


def test_explicit_overlay_fails_with_the_reason() -> None:
    told = make(world(node(user_namespaces=False)), sandbox(workspaces={"mode": "Overlay"}))
    assert isinstance(told, Invalid)
    assert "Overlay is unavailable here (NodesLackUserNamespaces" in told.message
    assert told.conditions[0].reason == "NodesLackUserNamespaces"
    refusal = refused(*VARIANTS[:2], words="violates PodSecurity")
    told = make(world(node(), memory=refusal), sandbox(workspaces={"mode": "Overlay"}))
    assert isinstance(told, Invalid)
    assert "AdmissionRefused: violates PodSecurity" in told.message


def test_plain_is_advised_without_reservation_only_where_plain_pods_were_admitted() -> None:
    asked = sandbox(workspaces={"mode": "Overlay"})
    by_any_policy = make(
        world(node(), memory=refused(*VARIANTS[:2], words="ValidatingAdmissionPolicy 'p' denied request: no pods")),
        asked,
    )
    assert by_any_policy.message.endswith("; correct what is refused, or use Auto, which also tries Plain")
    memory = Memory()
    memory.learn(Remember(overlay_refused("lab"), "violates PodSecurity", 60), NOW.timestamp())
    assert make(world(node(), memory=memory), asked).message.endswith("; use Auto or Plain")


@pytest.mark.parametrize("asked", ["Auto", "Overlay"])
def test_refusal_of_overlay_is_remembered_for_the_namespace(asked: str) -> None:
    memory = Memory()
    memory.learn(Remember(overlay_refused("lab"), "violates PodSecurity", 60), NOW.timestamp())
    made = make(world(node(), memory=memory), sandbox(workspaces={"mode": asked}))
    if asked == "Auto":
        assert way(made) == ("Plain", "volume")
        assert (
            pod_of(made)["metadata"]["annotations"]["rollout.dev/overlay"] == "AdmissionRefused: violates PodSecurity"
        )
    else:
        assert isinstance(made, Invalid)


def test_old_runtimes_get_the_executor_copied() -> None:
    assert way(make(world(node(runtime="containerd://1.7.27")), sandbox())) == ("Overlay", "copied")


def test_overlay_pod_is_kept_off_nodes_that_are_labelled_to_lack_user_namespaces() -> None:
    nodes = [node("a"), node("b", user_namespaces=False)]
    offers = {"key": "userns.rollout.dev/default", "operator": "DoesNotExist"}
    preferred = pod_of(make(world(*nodes), sandbox()))["spec"]["affinity"]["nodeAffinity"]
    assert list(preferred) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert offers in preferred["preferredDuringSchedulingIgnoredDuringExecution"][0]["preference"]["matchExpressions"]
    insisting = pod_of(make(world(*nodes), sandbox(workspaces={"mode": "Overlay"})))["spec"]["affinity"]["nodeAffinity"]
    (term,) = insisting["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [offers]}


def test_creating_a_pod_reads_no_node() -> None:
    class Untouchable(dict[str, Any]):
        """A node whose data must not be read."""

        def __getitem__(self, key: str) -> Any:
            raise AssertionError(f"a plan read {key} of a node")

        get = __getitem__  # type: ignore[assignment]

    where = world(node())
    for index in range(5000):
        where.cache._objects["Node"]["", f"n{index}"] = Untouchable()
    assert way(make(where, sandbox())) == ("Overlay", "volume")


def test_refusals_are_remembered_only_when_a_pod_was_admitted() -> None:
    everything = refused(*VARIANTS)
    plain = observe(world(node(), pod(RUNNING, overlay=False), memory=everything), sandbox())
    learned = {remember.fact: remember.message for remember in learned_refusals(plain)}
    assert learned == dict.fromkeys([overlay_refused("lab"), image_volumes_refused("lab")], "violates PodSecurity")
    copied = observe(
        world(node(), pod(RUNNING), memory=refused(VARIANTS[0], words="must specify a volume type")), sandbox()
    )
    assert [remember.fact for remember in learned_refusals(copied)] == [image_volumes_refused("lab")]
    waiting = observe(world(node(), memory=everything), sandbox())
    assert learned_refusals(waiting) == ()


def test_namespace_labelled_later_gets_overlay_with_plain_sandboxes_running() -> None:
    now, memory = NOW.timestamp(), Memory()
    for variant in VARIANTS[:2]:
        create = make(world(node(), memory=memory), sandbox())[-1]
        assert isinstance(create, Create)
        assert create.if_refused is not None
        assert create.if_refused.fact == pod_refused("uid-s", variant)
        memory.learn(replace(create.if_refused, message="violates PodSecurity"), now)
    for passed in range(0, 300, 10):
        later = world(node(), pod(RUNNING, overlay=False), memory=memory, now=NOW + timedelta(seconds=passed))
        for remember in learned_refusals(observe(later, sandbox())):
            memory.learn(remember, now + passed)
    later = world(node(), memory=memory, now=NOW + timedelta(seconds=300))
    assert way(make(later, sandbox())) == ("Overlay", "volume")


def test_remembered_refusal_is_not_learned_again() -> None:
    memory = refused(*VARIANTS[:2])
    for remember in learned_refusals(observe(world(pod(RUNNING, overlay=False), memory=memory), sandbox())):
        memory.learn(remember, NOW.timestamp())
    assert learned_refusals(observe(world(pod(RUNNING, overlay=False), memory=memory), sandbox())) == ()


def test_a_template_that_starves_the_executor_is_invalid_and_not_tried() -> None:
    template = {"spec": {"containers": [{"name": "sandbox", "resources": {"limits": {"memory": "8Mi"}}}]}}
    told = make(world(node()), sandbox(podTemplate=template))
    assert isinstance(told, Invalid)
    assert "resources.limits.memory: 8Mi is too little" in told.message

"""Which nodes count when it is decided whether Overlay can be had."""

from collections.abc import Mapping

import pytest

from rollout_operator.sandbox.placement import Node, candidates, node_of, restricted_to
from tests.unit.rollout_operator.sandbox.objects import node


def names(spec: dict[str, object], *nodes: Node) -> list[str]:
    return [found.name for found in candidates(spec, nodes)]


A = Node("a", {"zone": "1", "cores": "8"})
B = Node("b", {"zone": "2", "cores": "64"})
GPU = Node("gpu", {"zone": "1"}, taints=({"key": "gpu", "value": "yes", "effect": "NoSchedule"},))


def terms(*expressions: Mapping[str, object]) -> dict[str, object]:
    required = {"nodeSelectorTerms": [{"matchExpressions": [e]} for e in expressions]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def test_nodes_that_the_selector_leaves_out_do_not_count() -> None:
    assert names({"nodeSelector": {"zone": "2"}}, A, B) == ["b"]


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [
        ("In", ["1"], ["a"]),
        ("NotIn", ["1"], ["b"]),
        ("Exists", [], ["a", "b"]),
        ("DoesNotExist", [], []),
    ],
)
def test_required_affinity_is_read_as_kubernetes_reads_it(
    operator: str, values: list[str], expected: list[str]
) -> None:
    assert names(terms({"key": "zone", "operator": operator, "values": values}), A, B) == expected


def test_greater_and_less_compare_numbers() -> None:
    assert names(terms({"key": "cores", "operator": "Gt", "values": ["9"]}), A, B) == ["b"]
    assert names(terms({"key": "cores", "operator": "Lt", "values": ["9"]}), A, B) == ["a"]
    assert names(terms({"key": "zone", "operator": "Gt", "values": ["x"]}), A, B) == []


def test_affinity_terms_are_alternatives_and_an_empty_one_matches_nothing() -> None:
    one, two = ({"key": "zone", "operator": "In", "values": [z]} for z in "12")
    assert names(terms(one, two), A, B) == ["a", "b"]
    required: dict[str, object] = {"nodeSelectorTerms": [{}]}
    assert names({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}, A) == []


@pytest.mark.parametrize(
    ("toleration", "counts"),
    [
        ({"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_a_tainted_node_counts_only_for_who_tolerates_it(toleration: dict[str, str], counts: bool) -> None:
    assert names({"tolerations": [toleration]}, A, GPU) == (["a", "gpu"] if counts else ["a"])


def test_a_node_that_is_unwell_for_a_moment_still_counts() -> None:
    unwell = Node("u", taints=({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},))
    assert names({}, unwell) == ["u"]


def test_the_restriction_is_added_to_each_of_the_users_own_terms() -> None:
    spec = restricted_to(
        terms({"key": "zone", "operator": "Exists"}, {"key": "cores", "operator": "Exists"}), [A], [B, GPU]
    )
    both = [
        Node("a", {"zone": "1", "kubernetes.io/hostname": "a"}),
        Node("b", {"zone": "2", "kubernetes.io/hostname": "b"}),
    ]
    assert names(spec, *both) == ["a"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [len(term["matchExpressions"]) for term in required["nodeSelectorTerms"]] == [2, 2]


def test_the_restriction_names_the_fewer_nodes() -> None:
    able = [Node(f"able-{i}", {"kubernetes.io/hostname": f"able-{i}"}) for i in range(3)]
    unable = [Node("unable", {"kubernetes.io/hostname": "unable"})]
    spec = restricted_to({"nodeSelector": {}}, able, unable)
    assert "able-1" not in str(spec)
    assert names(spec, *able, *unable) == ["able-0", "able-1", "able-2"]


def test_a_preference_of_the_user_is_kept() -> None:
    preferred = [{"weight": 1, "preference": {"matchExpressions": []}}]
    spec = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}, "podAffinity": {}}
    }
    restricted = restricted_to(spec, [A], [B, GPU])
    assert restricted["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    assert "podAffinity" in restricted["affinity"]


def test_what_nodes_say_of_themselves_is_read() -> None:
    read = node_of(node(user_namespaces=True, runtime="containerd://2.1.0"), None, "noexec")
    assert (read.user_namespaces, read.runtime, read.exec_failure) == (frozenset({""}), "containerd://2.1.0", "noexec")
    assert node_of(node(user_namespaces=False), None, None).user_namespaces == frozenset()
    windows = node_of(node(labels={"kubernetes.io/os": "windows"}), None, None)
    assert candidates({}, [windows]) == []

"""The meaning of a pod's status. Messages are those of the kubelet, scheduler and runtimes of Kubernetes 1.33 to 1.35."""

from datetime import timedelta
from typing import Any

import pytest

from rollout_operator.sandbox.reasons import (
    ending_of,
    exec_failure,
    is_running,
    seconds_until_lost,
    trial_failure,
    waiting_for,
)
from tests.unit.rollout_operator.sandbox.objects import NOW, RUNNING, Json, disrupted, ended, node, pod, waiting

OWN_STORAGE = [
    "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ",
    'Container sandbox exceeded its local ephemeral storage limit "2Gi". ',
    'Usage of EmptyDir volume "state" exceeds the limit "1Gi". ',
]


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (ended(0, "Completed"), {}, "Idle"),
        (ended(137, "OOMKilled"), {"phase": "Failed"}, "OOMKilled"),
        (ended(2), {}, "Crashed"),
        (ended(0, "Completed"), {"reason": "DeadlineExceeded", "phase": "Failed"}, "DeadlineExceeded"),
        (None, {"reason": "Evicted", "phase": "Failed", "message": "low on memory"}, "Evicted"),
        *(
            (None, {"reason": "Evicted", "phase": "Failed", "message": words}, "StorageExceeded")
            for words in OWN_STORAGE
        ),
        (
            None,
            {
                "reason": "Evicted",
                "phase": "Failed",
                "message": "The node was low on resource: ephemeral-storage. Container sandbox was using 3Gi, request is 0.",
            },
            "DiskExhausted",
        ),
        (
            None,
            {
                "reason": "Evicted",
                "phase": "Failed",
                "message": "The node was low on resource: inodes. Threshold quantity: 327680, available: 319488. ",
            },
            "InodesExhausted",
        ),
        (
            None,
            {
                "reason": "Evicted",
                "phase": "Failed",
                "message": "The node was low on resource: pids. Threshold quantity: 2k, available: 1412. ",
            },
            "ProcessesExhausted",
        ),
        (
            None,
            {
                "reason": "Evicted",
                "phase": "Failed",
                "message": 'Container proxy exceeded its local ephemeral storage limit "1Gi". ',
            },
            "Evicted",
        ),
        (ended(143), {"conditions": disrupted("EvictionByEvictionAPI")}, "Evicted"),
        (ended(0), {"phase": "Succeeded", "conditions": disrupted("TerminationByKubelet", "low on memory")}, "Evicted"),
        (
            ended(0),
            {"phase": "Succeeded", "conditions": disrupted("TerminationByKubelet", OWN_STORAGE[2])},
            "StorageExceeded",
        ),
        (None, {"conditions": disrupted("DeletionByPodGC"), "phase": "Failed"}, "NodeLost"),
        (ended(137), {"conditions": disrupted("TerminationByKubelet"), "reason": "Preempting"}, "Preempted"),
        (ended(0), {"conditions": disrupted("TerminationByKubelet"), "reason": "Terminated"}, "NodeLost"),
        (ended(255, "Unknown"), {}, "NodeLost"),
        (ended(137, "ContainerStatusUnknown"), {"phase": "Failed"}, "NodeLost"),
        (
            None,
            {"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource: cpu"},
            "Evicted",
        ),
        (waiting("InvalidImageName", 'couldn\'t parse image name "A B"'), {}, "Invalid"),
    ],
)
def test_each_end_has_its_own_reason(state: Json | None, status: Json, reason: str) -> None:
    ending = ending_of(pod(state, **status))
    assert ending is not None
    assert ending.reason == reason
    assert ending.message


@pytest.mark.parametrize("state", [None, RUNNING, waiting("ContainerCreating"), waiting("ImagePullBackOff")])
def test_running_pod_has_not_ended(state: Json | None) -> None:
    assert ending_of(pod(state, podIP="10.0.0.1")) is None


def deleted(made: Json) -> Json:
    made["metadata"]["deletionTimestamp"] = "2026-05-04T12:00:00Z"
    return made


def test_deleted_pod_is_not_idle_though_its_executor_exits_with_0() -> None:
    for state in (RUNNING, ended(0, "Completed"), ended(137)):
        ending = ending_of(deleted(pod(state)))
        assert ending is not None
        assert ending.reason == "PodDeleted"


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        ("EvictionByEvictionAPI", "Evicted"),
        ("PreemptionByScheduler", "Preempted"),
        ("DeletionByTaintManager", "NodeLost"),
    ],
)
def test_disrupted_pod_gives_its_reason_once_it_is_deleted(by: str, reason: str) -> None:
    made = pod(RUNNING, conditions=disrupted(by))
    assert ending_of(made) is None
    ending = ending_of(deleted(made))
    assert ending is not None
    assert (ending.reason, ending.message) == (reason, by)


def test_a_pod_that_was_out_of_memory_before_it_was_deleted_is_still_out_of_memory() -> None:
    ending = ending_of(deleted(pod(ended(137, "OOMKilled"))))
    assert ending is not None
    assert ending.reason == "OOMKilled"


def test_executors_last_output_is_reported() -> None:
    ending = ending_of(pod(ended(2, message="config: listen: expected unix:PATH or tcp:HOST:PORT\n")))
    assert ending is not None
    assert ending.message == "the executor ended with exit code 2: config: listen: expected unix:PATH or tcp:HOST:PORT"


def test_container_on_a_lost_node_does_not_run_whatever_its_status() -> None:
    assert is_running(pod(RUNNING, podIP="10.0.0.1"))
    assert not is_running(pod(RUNNING))
    assert not is_running(pod(waiting("ContainerCreating"), podIP="10.0.0.1"))


PULL = 'failed to pull and unpack image "x:1": not found'


@pytest.mark.parametrize(
    ("made", "condition", "reason", "message"),
    [
        (pod(waiting("ErrImagePull", PULL)), "ImagePulled", "ImagePullBackOff", PULL),
        (
            pod(waiting("ImagePullBackOff", f'Back-off pulling image "x:1": ErrImagePull: {PULL}')),
            "ImagePulled",
            "ImagePullBackOff",
            PULL,
        ),
        (pod(waiting("ErrImageNeverPull", "not present")), "ImagePulled", "ErrImageNeverPull", "not present"),
        (
            pod(waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")),
            "Ready",
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root",
        ),
    ],
)
def test_reason_why_a_pod_does_not_start_is_quoted(made: Json, condition: str, reason: str, message: str) -> None:
    found = waiting_for(made, NOW)
    assert (found.condition, found.reason, found.message, found.is_problem) == (condition, reason, message, True)


def test_the_scheduler_is_quoted() -> None:
    words = "0/3 nodes are available: 3 Insufficient memory."
    made = pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}])
    del made["spec"]["nodeName"]
    found = waiting_for(made, NOW)
    assert (found.condition, found.reason, found.message, found.is_problem) == (
        "Scheduled",
        "Unschedulable",
        words,
        True,
    )


@pytest.mark.parametrize("state", [None, waiting("ContainerCreating"), waiting("PodInitializing")])
def test_short_problem_is_not_reported(state: Json | None) -> None:
    found = waiting_for(pod(state), NOW)
    assert not found.is_problem
    assert "n1" in found.message
    unscheduled = pod()
    del unscheduled["spec"]["nodeName"]
    assert not waiting_for(unscheduled, NOW).is_problem


def test_unpullable_init_container_is_reported_before_waiting_containers() -> None:
    made = pod(
        waiting("PodInitializing"), initContainerStatuses=[{"name": "executor", "state": waiting("ErrImagePull", PULL)}]
    )
    assert waiting_for(made, NOW).reason == "ImagePullBackOff"


def test_failed_executor_copy_is_not_a_node_that_refused_the_pod() -> None:
    init = [{"name": "executor", "state": ended(2, message="--copy-to: no space left")}]
    ending = ending_of(pod(waiting("PodInitializing"), phase="Failed", initContainerStatuses=init))
    assert ending is not None
    assert (ending.reason, ending.message.endswith("exit code 2: --copy-to: no space left")) == ("Crashed", True)
    done = [{"name": "executor", "state": ended(0, "Completed")}]
    assert ending_of(pod(waiting("PodInitializing"), initContainerStatuses=done)) is None


def test_an_injected_side_car_that_dies_does_not_end_a_sandbox_that_runs() -> None:
    side_car = [{"name": "proxy", "state": ended(1)}]
    assert ending_of(pod(RUNNING, initContainerStatuses=side_car)) is None


def test_failed_trial_is_recognized_by_its_exit_code_in_overlay_pods_only() -> None:
    assert trial_failure(pod(ended(3, message="mount: EPERM"))) == "mount: EPERM"
    assert trial_failure(pod(ended(3), overlay=False)) is None
    assert trial_failure(pod(ended(2, message="mount: EPERM"))) is None
    assert trial_failure(pod(RUNNING)) is None


def test_executor_that_exits_with_3_after_a_long_time_has_crashed() -> None:
    late = pod(ended(3, lived=600))
    assert trial_failure(late) is None
    ending = ending_of(late)
    assert ending is not None
    assert ending.reason == "Crashed"


DENIED = 'exec: "/.rollout/executor/executor": permission denied'


@pytest.mark.parametrize(
    "state",
    [ended(128, "StartError", DENIED), waiting("RunContainerError", DENIED), ended(126, "ContainerCannotRun", DENIED)],
)
def test_unexecutable_volume_differs_from_a_crashed_executor(state: Json) -> None:
    made = pod(state)
    assert exec_failure(made) is None, "no image volume is in it"
    made["spec"]["volumes"] = [{"name": "rollout-executor", "image": {"reference": "executor:1"}}]
    assert exec_failure(made) == DENIED
    other: Any = next(iter(state.values()))
    other["message"] = "no such file or directory"
    assert exec_failure(made) is None


def test_node_is_lost_only_after_some_seconds_of_silence() -> None:
    assert seconds_until_lost(node(), NOW) is None
    silent = node(ready=False, since=NOW)
    assert seconds_until_lost(silent, NOW) == 30
    assert seconds_until_lost(silent, NOW + timedelta(seconds=31)) == -1

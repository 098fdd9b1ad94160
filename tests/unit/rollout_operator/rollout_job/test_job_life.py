"""Random lives of a RolloutJob: whatever people, Kubernetes and runners do, it succeeds once all of them work again."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_operator.world import Memory
from tests.support.full import examples
from tests.unit.rollout_operator.rollout_job.scenes import Scene, manifest, report

ENGINE = {"image": "vllm:0.26", "version": "0.27.0"}
SERVER = {"model": {"name": "small"}, "engine": ENGINE, "replicas": 3, "toolCallParser": "hermes"}
OWN_SERVER = {"agent": {"type": "ToolCalling"}, "model": {"server": SERVER}}
INDEX = st.integers(0, 1)


class Life(RuleBasedStateMachine):
    """A job with two runners, of four rollouts each. The plan is carried out after every event."""

    scene: Scene

    @initialize(owns_server=st.booleans())
    def begin(self, owns_server: bool) -> None:
        self.scene = Scene(manifest(runners={"replicas": 2}, **(OWN_SERVER if owns_server else {})))
        self.sealed = [0, 0]
        self.is_held, self.owns_server, self.version = False, owns_server, 0

    def runs(self, index: int) -> bool:
        pods = {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for pod in self.scene.runners}
        return str(index) in pods

    def is_true(self, kind: str) -> bool:
        found = (one for one in self.scene.status.get("conditions", ()) if one["type"] == kind)
        return any(one["status"] == "True" for one in found)

    @rule(seconds=st.sampled_from([1, 11, 40, 70, 200, 700]))
    def pass_time(self, seconds: int) -> None:
        self.scene.passes(seconds)

    @rule(suspend=st.booleans())
    def suspend_or_resume(self, suspend: bool) -> None:
        self.scene.job["spec"]["suspend"] = suspend

    @rule()
    def suspend_or_resume_by_another_manager(self) -> None:
        if self.scene.batch_job is not None:
            self.is_held = not self.is_held
            self.scene.another_manager_suspends(self.is_held)

    @rule(index=INDEX)
    def seal_a_rollout(self, index: int) -> None:
        done = {entry["index"] for entry in self.scene.reported if entry["state"] == "Completed"}
        if self.runs(index) and index not in done:
            self.sealed[index] = min(3, self.sealed[index] + 1)
            self.scene.reports(report(index, sealed=self.sealed[index], total=4))

    @rule(index=INDEX)
    def end_a_runner(self, index: int) -> None:
        if self.runs(index):
            self.scene.runner_ends(index, "Completed", total=4, sealed=4)

    @rule(index=INDEX, times=st.sampled_from([1, 1, 12]))
    def fail_a_runner(self, index: int, times: int) -> None:
        for _ in range(times):
            self.scene.runner_fails(index)
            self.scene.settle(12)

    @rule(index=INDEX)
    def evict_a_runner(self, index: int) -> None:
        self.scene.runner_is_evicted(index)

    @rule()
    def delete_the_runners_job(self) -> None:
        self._lose_pods()
        self.scene.cache.remove("Job", "team", "sums-runner")

    @rule(index=INDEX)
    def delete_a_report(self, index: int) -> None:
        for shard in list(self.scene.cache.all("RolloutShard"))[index:]:
            self.scene.cache.remove("RolloutShard", "team", shard["metadata"]["name"])

    @rule()
    def delete_the_model_server(self) -> None:
        self.scene.cache.remove("ModelServer", "team", "sums-model")
        self.version = 0

    @rule()
    def update_the_policy(self) -> None:
        if self.scene.model_server is not None:
            self.version += 1
            self.scene.model_server["spec"]["policy"] = {"version": self.version}

    @rule(ready=st.booleans())
    def change_the_model_server(self, ready: bool) -> None:
        if self.scene.model_server is not None:
            self.scene.model_server_says("Ready", str(ready))

    @rule()
    def restart_the_operator(self) -> None:
        self.scene.memory = Memory()

    @rule(number=st.integers(0, 99))
    def request_a_sandbox(self, number: int) -> None:
        if self.scene.runners:
            self.scene.has_sandbox(f"sandbox-{number}")

    @invariant()
    def conditions_are_true(self) -> None:
        self.scene.settle(12)
        self.scene.passes(1)  # Times of objects are whole seconds.
        server = self.scene.model_server
        assert server is None or server["spec"].get("policy", {}).get("version", 0) == self.version
        is_over = self.is_true("Succeeded") or self.is_true("Failed") or self.scene.job["spec"].get("suspend")
        assert server is not None or is_over or not self.owns_server
        assert not (self.is_true("Suspended") and (self.scene.runners or self.scene.sandboxes))

    def teardown(self) -> None:
        for _ in range(14):
            self._be_well()
            if self.is_true("Succeeded"):
                break
        assert self.is_true("Succeeded"), self.scene.status
        self.scene.passes(100)
        self.scene.settle(12)
        assert not self.scene.sandboxes
        assert self.scene.model_server is None

    def _be_well(self) -> None:
        scene = self.scene
        scene.passes(200)
        if self.is_true("Failed"):  # A person suspends and resumes it, as its message says.
            scene.job["spec"]["suspend"] = True
            self.conditions_are_true()
            self._lose_pods()
            self.conditions_are_true()
        scene.job["spec"]["suspend"] = False
        self.change_the_model_server(ready=True)
        self.conditions_are_true()
        if self.is_held:
            self.suspend_or_resume_by_another_manager()
            self.conditions_are_true()
        for index in (0, 1):
            self.end_a_runner(index)
        self.conditions_are_true()

    def _lose_pods(self) -> None:
        for pod in list(self.scene.cache.all("Pod")):
            self.scene.cache.remove("Pod", "team", pod["metadata"]["name"])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(400), stateful_step_count=18)

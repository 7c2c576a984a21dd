"""Whatever happens in whatever order, with the operator killed between any two writes: the job ends up where it should.

Held at all times: no attempt is submitted twice, attempts only grow, and two drivers never run at the same time.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import World, job_spec

CRASHES = st.one_of(st.none(), st.integers(0, 4))


class Lives(RuleBasedStateMachine):
    """One job, everybody's moves in any order."""

    world: World

    @initialize(
        limit=st.integers(0, 3),
        replicas=st.integers(1, 3),
        scorers=st.integers(0, 3),
        judges=st.integers(0, 2),
        suspended=st.booleans(),
        queued=st.booleans(),
    )
    def create(self, limit: int, replicas: int, scorers: int, judges: int, suspended: bool, queued: bool) -> None:
        spec = job_spec(retry={"limit": limit, "backoffSeconds": 5}, rollout={"replicas": replicas})
        if scorers:
            spec["reward"] = {"functions": [{"type": "rewardModel", "rewardModel": {"source": "/models/scores"}}]}
            spec["rewardModel"] = {"replicas": scorers}
        if judges:
            judged = {"type": "judge", "judge": {"template": "{response}"}}
            spec["reward"] = {"functions": [judged, *(spec["reward"]["functions"] if scorers else ())]}
            spec["judge"] = {"model": {"source": "/models/judge"}, "replicas": judges}
        if suspended:
            spec["suspend"] = True
        if queued:
            spec["queueName"] = "rl"
        self.world = World(spec=spec)

    @rule(writes=CRASHES)
    def look(self, writes: int | None) -> None:
        self.world.look(writes)

    @rule()
    def kuberay(self) -> None:
        self.world.kuberay()

    @rule()
    def kubelet(self) -> None:
        self.world.kubelet()

    @rule()
    def drive(self) -> None:
        self.world.drive()

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.sampled_from([-86_400.0, -3600.0, -3.0, 3600.0, 86_400.0]))
    def set_the_clock(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(replicas=st.integers(1, 6))
    def scale(self, replicas: int) -> None:
        self.world.edit(rollout={"replicas": replicas})

    @precondition(lambda self: "rewardModel" in self.world.spec)
    @rule(replicas=st.integers(1, 4))
    def scale_reward_models(self, replicas: int) -> None:
        self.world.edit(rewardModel={"replicas": replicas})

    @precondition(lambda self: "judge" in self.world.spec)
    @rule(replicas=st.integers(1, 3))
    def scale_judges(self, replicas: int) -> None:
        self.world.edit(judge={"replicas": replicas})

    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        self.world.edit(suspend=value)

    @precondition(lambda self: self.world.running())
    @rule(code=st.sampled_from([0, 1, 1, 64, 65, 75, 137]))
    def end(self, code: int) -> None:
        driver = self.world.running()[0]
        self.world.end(driver, "succeeded" if code == 0 else "failed", code)

    @rule(step=st.integers(0, 50))
    def checkpoint(self, step: int) -> None:
        self.world.checkpoint_step = max(step, self.world.checkpoint_step or 0)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), disrupted=st.booleans())
    def lose(self, data: st.DataObject, disrupted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.pods)))
        self.world.lose_pod(name, disrupted=disrupted)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), rounds=st.integers(1, 50), writes=CRASHES)
    def keep_crashing(self, data: st.DataObject, rounds: int, writes: int | None) -> None:
        """Pods of one group, while all others are ready."""
        group = data.draw(st.sampled_from(sorted({pod.group for pod in self.world.pods.values()})))
        for _ in range(rounds):
            for name in [pod.name for pod in self.world.pods.values() if pod.group == group and not pod.ended]:
                self.world.lose_pod(name, message="Error, exit code 1")
            self.world.kubelet()
            self.world.look(writes)
            self.world.kuberay()
            self.world.wait(2)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.world._end_pod(data.draw(st.sampled_from(sorted(self.world.pods))))

    @precondition(lambda self: self.world.clusters)
    @rule(data=st.data())
    def delete_cluster(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.clusters)))
        self.world.clusters[name] = replace(self.world.clusters[name], deleting=True)

    @precondition(lambda self: self.world.clusters)
    @rule(data=st.data())
    def cluster_vanishes(self, data: st.DataObject) -> None:
        """Deleted and gone between two looks."""
        del self.world.clusters[data.draw(st.sampled_from(sorted(self.world.clusters)))]

    @precondition(lambda self: "queueName" in self.world.spec)
    @rule(taken_back=st.booleans())
    def hold(self, taken_back: bool) -> None:
        self.world.hold(taken_back=taken_back)

    @precondition(lambda self: "queueName" in self.world.spec)
    @rule()
    def admit(self) -> None:
        self.world.admit()

    @rule(reachable=st.booleans(), leftovers=st.integers(0, 2))
    def network(self, reachable: bool, leftovers: int) -> None:
        self.world.reachable, self.world.leftovers = reachable, leftovers

    @invariant()
    def attempts_are_submitted_once_and_in_order(self) -> None:
        if hasattr(self, "world"):
            assert self.world.submissions == sorted(set(self.world.submissions))

    @invariant()
    def one_driver_runs(self) -> None:
        if hasattr(self, "world"):
            assert len(self.world.running()) <= 1

    @invariant()
    def the_status_is_whole(self) -> None:
        if not hasattr(self, "world") or not self.world.status.conditions:
            return
        assert self.world.reason("Running")
        assert len(self.world.status.attempts) <= 10
        for item in self.world.status.conditions:
            assert item.reason
            assert len(item.message) <= 1024

    def teardown(self) -> None:
        """The faults end, and everybody does their part: the job gets where its spec wants it."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.reachable, world.leftovers = True, 0
        world.admit()
        world.settle(60, seconds=30.0)
        state = f"{world.status.document()}"
        if world.value("Finished") == "True":
            assert (world.clusters, world.pods) == ({}, {}), state
        elif world.spec.get("suspend"):
            assert world.value("Suspended") == "True", state
            assert (world.clusters, world.pods) == ({}, {}), state
        else:
            assert world.reason("Running") == "Training", state
            assert len(world.clusters) == 1, state
            assert len(world.running()) == 1, state
            assert len(world.pods) == world.wanted_pods(), state
            assert world.reason("Resizing") == "AtSize", state
            assert world.running()[0].generation == world.generation, state
        # At rest: another look changes nothing.
        decision = world.look()
        assert decision.actions == (), state
        assert decision.status is None or decision.status.conditions == world.status.conditions, state


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=int(os.environ.get("RLJOB_CHAOS_RUNS", "30")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

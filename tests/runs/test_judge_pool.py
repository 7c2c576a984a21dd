"""A judge on the job's own engines, on a real Ray cluster that has a node for each pod: it loses an engine with
questions in hand, has another one in its place, and shrinks. No sample has a score that is not the judge's."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
from judge_models import answer_alone, made
from ray_nodes import ray_nodes
from real_runs import Runner, metrics_of, wait_for
from scoring_pools import SeenPool, unhurried
from test_drive import Attempts

from rljob_api import cluster
from rljob_api.spec.reward import Reward
from rljob_trainer.rewards.judge.question import question_of
from rljob_trainer.rewards.terms import Response

REWARD = {
    "functions": [{"type": "judge", "judge": {"template": "{prompt}{response}", "parser": {"high": 9}, "maxTokens": 4}}]
}


def assert_scores_are_the_judges(output: Path, model: Path) -> int:
    """Of every sample of every step on record, by transformers; returns how many there are."""
    judge = Reward.model_validate(REWARD).functions[0].judge
    assert judge is not None
    known: dict[tuple[str, str], float] = {}
    rows = [json.loads(line) for file in (output / "samples").iterdir() for line in file.read_text().splitlines()]
    for row in rows:
        asked = (row["prompt"], row["response"])
        if asked not in known:
            # The marks between which texts stand are a digest of all of them.
            response = Response(row["prompt"], row["response"], row["answer"], "copy", 3, "stop")
            system, user = question_of(judge, "m", response).body["messages"]
            said = answer_alone(model, f"system: {system['content']}\nuser: {user['content']}\n")
            known[asked] = int(said) / 9
        assert row["score"] == pytest.approx(known[asked], abs=1e-6), row
    assert len(set(known.values())) >= 4
    return len(rows)


def test_a_judge_loses_an_engine_and_shrinks_while_training_goes_on(runner: Runner, forked_workers: str) -> None:
    model = made(runner.folder / "mnt" / "claim" / "judge", seed=2)
    with ray_nodes() as nodes:
        for pod, role in (("trainer-a", cluster.TRAINER), ("rollout-a", cluster.ROLLOUT)):
            nodes.add(pod, role)
        for pod in ("judge-a", "judge-b"):
            nodes.add(pod, cluster.JUDGE)
        attempts = Attempts(
            runner,
            nodes,
            placement="separate",
            pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "recompute"},
            batch={"samplesPerPrompt": 4, "miniBatchGroups": 4},
            reward={"functions": [*REWARD["functions"], unhurried(runner.folder)]},
            judge={"model": {"source": "pvc://claim/judge"}, "engine": "torch", "replicas": 2},
            validation={"atStart": False},
            logging={"tensorboard": False, "samplesEvery": 1, "samplesPerWrite": 10_000},
            stop={"steps": 100_000},
        )
        attempts.mount(generation=1)
        client, output = attempts.client, attempts.output
        pool = SeenPool(client, "judge")
        run = attempts.start(attempt=1, generation=1)
        wait_for(client.answers, run)
        wait_for(lambda: client.status().step >= 1 and set(pool.serving) == {"judge-a", "judge-b"}, run)

        # Both stand still, with questions in hand, and that is told; one of them dies with its questions.
        pods = {pod: nodes.actors(pod) for pod in ("judge-a", "judge-b")}
        assert all(pods.values()), pods
        for process in itertools.chain(*pods.values()):
            os.kill(process, signal.SIGSTOP)
        wait_for(lambda: all(engine.running for engine in pool.serving.values()), run)
        wait_for(lambda: pool.waits.startswith("2 of 2 engines to answer "), run)
        assert 'rljob_judges{job="tiny",namespace="team",state="serving"} 2' in client.call("/metrics")
        for process in pods["judge-a"]:
            os.kill(process, signal.SIGKILL)
        for process in pods["judge-b"]:
            os.kill(process, signal.SIGCONT)
        step = client.status().step
        wait_for(lambda: client.status().step >= step + 2 and len(pool.serving) == 2, run)

        client.tell(generation=2, attempt=1, judge_replicas=1)
        wait_for(lambda: bool(pool.safe_to_delete), run)
        (drained,) = pool.safe_to_delete
        assert drained is not None
        assert set(pool.serving) == {"judge-a", "judge-b"} - {drained}
        nodes.remove(drained)
        step = client.status().step
        wait_for(lambda: client.status().step >= step + 2, run)

        client.tell(generation=3, attempt=1, suspend=True)
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 75, printed
    steps = metrics_of(output)
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert {record["reward/error_ratio"] for record in steps} == {0.0}
    told = {name: sum(record[f"judge/judge/{name}"] for record in steps) for name in ("failures", "asked_elsewhere")}
    assert told["failures"] == 0
    assert told["asked_elsewhere"] >= 1
    assert assert_scores_are_the_judges(output, model) == 16 * len(steps)

"""The benchmark with a real model trains on the example's own job: what it changes is laid over it."""

from __future__ import annotations

from benchmarks.real_model.__main__ import JOB, OVERLAY

from rljob_api import load_jobs, resolve


def test_the_job_is_the_example_with_what_a_small_model_needs() -> None:
    (example,) = load_jobs(JOB)
    (job,) = load_jobs(JOB, overlays=[OVERLAY])
    assert JOB.name == "gsm8k.yaml"
    assert job.spec.data.train.source == example.spec.data.train.source
    assert job.spec.data.answer == example.spec.data.answer
    spec = resolve(job).spec
    # Nothing of the example's PPO and of its GPUs is left.
    assert (spec.algorithm.advantage.estimator, spec.algorithm.critic) == ("grpo", None)
    assert (spec.algorithm.kl.in_loss, spec.algorithm.kl.in_reward) == (None, None)
    assert (spec.trainer.gpus_per_replica, spec.rollout.gpus_per_replica, spec.rollout.engine) == (0, 0, "torch")
    assert (spec.batch.groups, spec.batch.mini_batch_groups, spec.batch.samples_per_prompt) == (8, 8, 8)
    # The goal is over the first and the last three of at least 15 steps.
    assert (spec.stop.steps, spec.stop.epochs) == (16, None)

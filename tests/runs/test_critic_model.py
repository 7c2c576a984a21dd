"""A run whose critic starts from a reward model: it goes on with that one alone."""

from __future__ import annotations

from real_runs import Runner, metrics_of
from reward_models import made
from tiny_job import copy_job


def test_the_critic_of_a_run_is_the_reward_model_that_it_began_with(runner: Runner) -> None:
    """Another size than the policy's, on two ranks."""
    critic, output = runner.folder / "critic", runner.folder / "output"
    made(critic, characters="0123456789=")
    document = copy_job(
        algorithm={"preset": "ppo", "critic": {"model": {"source": "critic"}, "learningRate": 1e-3}},
        trainer={"replicas": 2, "optimizer": {"learningRate": 1e-3}},
    )
    job = runner.write(document)
    runner.run("run", job, "--output", output, "--steps", "2")
    first, second = metrics_of(output)[1:]
    # A head that began at zero would say nothing yet.
    assert abs(first["value/mean"]) > 0.1
    assert second["critic/steps"] == 2
    runner.run("run", job, "--output", output, "--steps", "4")
    assert [record["step"] for record in metrics_of(output)] == [0, 1, 2, 3, 4]
    critic.rename(runner.folder / "before")
    made(critic, characters="0123456789=", seed=1)
    printed = runner.run("run", job, "--output", output, expect=66)
    assert "belongs to another model: spec.algorithm.critic.model, version was" in printed

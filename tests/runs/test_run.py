"""`rljob run` as a user sees it: outputs, resume after kill -9 and after a signal, errors, modes and placements."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from real_runs import Runner, metrics_of, wait_for
from safetensors.torch import load_file
from tiny_job import copy_job
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_trainer.telemetry.names import check_all
from rljob_trainer.telemetry.run_folder import read_samples, sample_files, samples_path

MEASURED = (
    "timing",
    "throughput",
    "progress/seconds",
    "progress/version",
    "memory",
    "pipeline/learner_idle_ratio",
    "pipeline/engine_idle_ratio",
    "rollout",
    "time",
)
"""What differs between two runs that do the same."""


def repeatable(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(MEASURED)}


def weights(runner: Runner, output: Path) -> dict[str, torch.Tensor]:
    exported = runner.folder / f"exported-{output.name}"
    runner.run("export", output, "--to", exported)
    return load_file(exported / "model.safetensors")


def rank_of(driver: int) -> int:
    """The process of the learner's only rank."""
    [rank] = [
        child
        for child in psutil.Process(driver).children(recursive=True)
        if any(part.startswith("ray::RankActor") for part in child.cmdline())
    ]
    return rank.pid


@pytest.mark.integrity
def test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same(runner: Runner) -> None:
    job = runner.write(copy_job())
    whole, killed = runner.folder / "whole", runner.folder / "killed"
    printed = runner.run("run", job, "--output", whole, cold=True)
    assert "succeeded: 6 of 6 steps are done" in printed
    assert printed.rstrip().endswith(f"export the model: rljob export {whole} --to DIR")

    records = metrics_of(whole)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 5, 6]
    check_all(name for r in records for name in r if "/" in name)
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["version"], summary["samples"]) == ("succeeded", 6, 6, 192)
    assert set(summary["validation"]["held-out"]["mean@1"]) == {"first", "last", "best"}
    assert yaml.safe_load((whole / "job.yaml").read_text())["spec"]["batch"]["groups"] == 8
    assert "<svg" in (whole / "report.html").read_text()
    events = json.loads((whole / "timeline.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"trainer", "learner update", "publication", "engine 0"} <= rows.keys()
    drawn = {(event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(rows["learner update"], "update"), (rows["publication"], "publish")} <= drawn
    assert not drawn & {(rows["trainer"], "update"), (rows["trainer"], "publish")}
    sampled = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rows["engine 0"]]
    assert {"version 0", "version 5"} <= set(sampled)
    assert (whole / "samples" / "step-000000.jsonl").exists()
    assert (whole / "samples" / "step-000006.jsonl").exists()

    for victim, steps_seen in (("driver", 1), ("rank", 3), ("driver", 4)):
        process = runner.start("run", job, "--output", killed)
        wait_for(lambda seen=steps_seen: len(metrics_of(killed)) > seen, process)  # type: ignore[misc]
        os.kill(process.pid if victim == "driver" else rank_of(process.pid), signal.SIGKILL)
        printed, _ = process.communicate()
        # A run whose learner died says that it can be tried again.
        assert process.returncode == (-signal.SIGKILL if victim == "driver" else 75), printed
    assert "resuming from the checkpoint of step" in runner.run("run", job, "--output", killed)
    assert [repeatable(r) for r in metrics_of(killed)] == [repeatable(r) for r in records]
    expected, actual = weights(runner, whole), weights(runner, killed)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)

    exported = runner.folder / "exported-whole"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = model.generate(**tokenizer("12=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] > 4

    printed = runner.run("eval", job, "--run", whole, "--json")
    metrics = json.loads(printed[printed.index("{") :])
    assert metrics["validation/mean"] == records[-1]["validation/mean"]
    printed = runner.run("eval", job, "--model", exported.name, "--json")
    assert json.loads(printed[printed.index("{") :])["validation/mean"] == metrics["validation/mean"]


DIES_AFTER_STEP_3 = """
import os, signal, sys
from rljob_trainer.cli import main
from rljob_trainer.telemetry.sinks import JsonlSink

write = JsonlSink.step

def write_and_die(self, step, metrics):
    write(self, step, metrics)
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

JsonlSink.step = write_and_die
sys.exit(main())
"""


@pytest.mark.integrity
@pytest.mark.slow(stands_for="test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same")
def test_actor_critic_muon_and_the_kl_controller_are_after_a_kill_what_they_would_have_been(runner: Runner) -> None:
    controller = {"type": "adaptive", "target": 1e-4, "horizon": 20}
    job = runner.write(
        copy_job(
            algorithm={
                "preset": "ppo",
                "critic": {"learningRate": 1e-2},
                "kl": {"inReward": {"coefficient": 0.1, "controller": controller}},
            },
            batch={"groups": 8, "samplesPerPrompt": 1, "miniBatchGroups": 4},
            trainer={"optimizer": {"type": "muon", "learningRate": 1e-2}},
            validation={"atStart": False},
            stop={"steps": 4},
        )
    )
    whole, killed = whole_and_killed(runner, job)
    assert len({record["kl/coefficient"] for record in metrics_of(whole)}) == 4
    expected = same_state(whole, killed)
    kinds = {name.split(".")[0] + "." + name.rpartition(".")[2] for name in expected}
    assert {"actor.momentum", "critic.momentum"} <= kinds
    assert weights(runner, whole), "the policy alone is read, whichever optimizer trained it"
    printed = runner.run("eval", job, "--run", whole, "--json")
    evaluated = json.loads(printed[printed.index("{") :])
    assert evaluated["validation/mean"] == metrics_of(whole)[-1]["validation/mean"]


@pytest.mark.integrity
@pytest.mark.slow(stands_for="test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same")
def test_two_ranks_are_after_a_kill_what_they_would_have_been(runner: Runner) -> None:
    trainer = {"replicas": 2, "optimizer": {"learningRate": 1e-3}}
    job = runner.write(copy_job(trainer=trainer, validation={"atStart": False}, stop={"steps": 4}))
    whole, killed = whole_and_killed(runner, job)
    for output in (whole, killed):
        shards = list((output / "checkpoints" / "step-00000004" / "learner").glob("*.distcp"))
        assert {shard.name.split("_")[2] for shard in shards} == {"0", "1"}, "both ranks write"
    same_state(whole, killed)


DIES_BEFORE_STEP_4_HAS_ITS_NAME = """
import os, signal, sys
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.cli import main

write = FolderCheckpoints.write

async def write_or_die(self, step, state, learner, rest, may_commit):
    def die():
        if any(self.folder.glob(".writing-*")):
            os.kill(os.getpid(), signal.SIGKILL)

    return await write(self, step, state, learner, rest, die if step == 4 else may_commit)

FolderCheckpoints.write = write_or_die
sys.exit(main())
"""


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for=[
        "test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same",
        "tests/runs/test_vllm.py::test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer",
    ]
)
@pytest.mark.vllm
def test_with_a_vllm_engine_a_run_is_after_a_kill_what_it_would_have_been(runner: Runner) -> None:
    """Two starts instead of three: what the killed one had done of steps 3 and 4, the next one does again."""
    task = {"type": "copy", "digits": 40, "size": 16}
    job = copy_job(
        # Prompts longer than a block of vLLM's cache, which come again in step 3: an engine that had served steps 1 and
        # 2 would answer from its cache, were it not dropped; the one after the kill has none.
        data={"train": {"task": task}, "prompt": "question", "answer": "answer", "maxPromptTokens": 44},
        # More samples than run at once: who runs beside whom is the same again.
        rollout={"engine": "vllm", "maxResponseTokens": 24, "maxConcurrent": 12, "engineArgs": {"block_size": 32}},
        stop={"steps": 4},
    )
    job["spec"]["model"]["random"]["contextLength"] = 80
    path, output = runner.write(job), runner.folder / "output"
    dies = ("-c", DIES_BEFORE_STEP_4_HAS_ITS_NAME)
    runner.run("run", path, "--output", output, program=dies, expect=-signal.SIGKILL)
    records = metrics_of(output)
    [nameless] = (output / "checkpoints").glob(".writing-step-00000004-*")
    expected = tensors_of(nameless)
    assert "resuming from the checkpoint of step 2" in runner.run("run", path, "--output", output)
    assert [repeatable(r) for r in metrics_of(output)] == [repeatable(r) for r in records]
    actual = learner_state(output)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


A_RANK_IS_LATE_AT_STEP_4 = """
import sys
from pathlib import Path
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.cli import main
from rljob_trainer.errors import CheckpointError

write = FolderCheckpoints.write

async def write_late(self, step, state, learner, rest, may_commit):
    places = []

    async def fails(place):
        places.append(Path(place))
        raise CheckpointError("rank 1 has no room.")

    try:
        return await write(self, step, state, fails if step == 4 else learner, rest, may_commit)
    finally:
        for place in places:
            place.mkdir(parents=True)
            (place / "late").touch()

FolderCheckpoints.write = write_late
sys.exit(main())
"""


@pytest.mark.integrity
def test_nothing_stays_of_a_checkpoint_that_a_rank_went_on_with(runner: Runner) -> None:
    path, output = runner.write(copy_job()), runner.folder / "output"
    printed = runner.run("run", path, "--output", output, program=("-c", A_RANK_IS_LATE_AT_STEP_4))
    assert "rank 1 has no room. Training continues" in printed
    assert sorted(os.listdir(output / "checkpoints")) == ["step-00000002", "step-00000006"]


def whole_and_killed(runner: Runner, job: Path) -> tuple[Path, Path]:
    """The folders of an untouched run and of one that was killed after step 3 and went on from step 2. Their records
    are the same."""
    whole, killed = runner.folder / "whole", runner.folder / "killed"
    runner.run("run", job, "--output", whole)
    runner.run("run", job, "--output", killed, program=("-c", DIES_AFTER_STEP_3), expect=-signal.SIGKILL)
    assert "resuming from the checkpoint of step 2" in runner.run("run", job, "--output", killed)
    assert [repeatable(r) for r in metrics_of(killed)] == [repeatable(r) for r in metrics_of(whole)]
    return whole, killed


def same_state(one: Path, other: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint of either of two runs, which are bitwise the same."""
    expected, actual = learner_state(one), learner_state(other)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    return expected


def learner_state(output: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint: weights and optimizers of actor and critic."""
    return tensors_of(max((output / "checkpoints").iterdir()))


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    together = checkpoint.parents[1] / "learner.pt"
    dcp_to_torch_save(checkpoint / "learner", together)
    tensors: dict[str, torch.Tensor] = torch.load(together)
    return tensors


def test_a_signal_leaves_a_checkpoint_and_the_same_command_goes_on(runner: Runner) -> None:
    job = runner.write(copy_job(checkpoint={"everySteps": 0}, stop={"steps": 400}))
    output = runner.folder / "output"
    process = runner.start("run", job, "--output", output)
    wait_for(lambda: len(metrics_of(output)) > 3, process)
    second = runner.run("run", job, "--output", output, expect=1)
    assert "another run is writing to" in second
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, printed
    done = metrics_of(output)[-1]["step"]
    assert (output / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists(), printed
    assert json.loads((output / "summary.json").read_text())["outcome"] == "interrupted"
    runner.run("run", job, "--output", output, "--steps", str(done + 2))
    assert [r["step"] for r in metrics_of(output)] == list(range(done + 3))


ASKED_TO_STOP_IN_A_LONG_UPDATE = """
import asyncio, os, signal, sys
from rljob_trainer.cli import main
from rljob_trainer.driver.training import PipelineTrainer

train = PipelineTrainer.train

async def interrupted(self, groups, *, step, version):
    if step == 2:
        self._took = 600.0  # seconds, as if the step before had been a long one
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
    return await train(self, groups, step=step, version=version)

PipelineTrainer.train = interrupted
sys.exit(main())
"""


def test_an_update_that_is_too_long_for_a_signal_is_given_up_and_the_step_before_it_is_saved(runner: Runner) -> None:
    job = runner.write(
        copy_job(
            batch={"groups": 16, "samplesPerPrompt": 8, "miniBatchGroups": 16},
            trainer={"optimizer": {"learningRate": 1e-3}, "microBatchTokens": 16},  # many passes before it changes
            validation={"atStart": False},
            checkpoint={"everySteps": 0},
            stop={"steps": 3},
        )
    )
    output = runner.folder / "output"
    ended = 128 + signal.SIGTERM
    printed = runner.run("run", job, "--output", output, program=("-c", ASKED_TO_STOP_IN_A_LONG_UPDATE), expect=ended)
    assert "so it is abandoned" in printed
    assert "at step 1" in printed
    assert "Traceback" not in printed
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000001"]
    runner.run("run", job, "--output", output)
    assert [r["step"] for r in metrics_of(output)] == [1, 2, 3]


ASKED_TO_STOP_WHEN_WEIGHTS_HAVE_CHANGED = """
import asyncio, os, signal, sys
from rljob_trainer.cli import main
from rljob_trainer.driver.training import PipelineTrainer

train = PipelineTrainer.train

async def never_done(self, groups, *, step, version):
    metrics = await train(self, groups, step=step, version=version)
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)
    return metrics

PipelineTrainer.train = never_done
sys.exit(main())
"""


def test_a_signal_that_leaves_no_checkpoint_says_why_and_the_same_command_begins_anew(runner: Runner) -> None:
    """The update has changed the weights, is not done within the grace, and no step was saved before."""
    job = runner.write(copy_job(validation={"atStart": False}, checkpoint={"everySteps": 0}, stop={"steps": 3}))
    output, ended = runner.folder / "output", 128 + signal.SIGTERM
    dies = ("-c", ASKED_TO_STOP_WHEN_WEIGHTS_HAVE_CHANGED)
    printed = runner.run("run", job, "--output", output, program=dies, expect=ended)
    assert "so step 1 can no longer be saved: there is no checkpoint (checkpoint.everySteps)" in printed
    assert "SIGTERM at step 1; there is no checkpoint" in json.loads((output / "summary.json").read_text())["reason"]
    assert not (output / "checkpoints").exists()
    assert "; nothing was saved yet: the same command starts over" in printed
    printed = runner.run("run", job, "--output", output)
    assert f"an earlier run in {output} ended before its first checkpoint, so this one starts over" in printed
    assert "resuming" not in printed
    assert [r["step"] for r in metrics_of(output)] == [1, 2, 3]


SLOW_REWARD = """
import pathlib, time

def score(response):
    pathlib.Path(__file__).with_name("asked").touch()
    time.sleep(600)
    return 0.0
"""


def test_a_signal_ends_a_run_that_validates_before_its_first_step_and_leaves_nobody(runner: Runner) -> None:
    (runner.folder / "slow_reward.py").write_text(SLOW_REWARD)
    functions = [{"type": "custom", "function": "slow_reward:score"}]
    job = runner.write(copy_job(reward={"functions": functions, "timeoutSeconds": 600}))
    process = runner.start("run", job, "--output", runner.folder / "output")
    wait_for((runner.folder / "asked").exists, process)
    others = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, printed
    assert "interrupted: SIGINT before the first step; report: " in printed
    assert "; nothing was saved yet: the same command starts over" in printed
    assert "Traceback" not in printed
    assert json.loads((runner.folder / "output" / "summary.json").read_text())["outcome"] == "interrupted"
    _, left = psutil.wait_procs(others, timeout=30)
    assert others
    assert not left


SLOW_VALIDATION = """
import pathlib, time

def score(response, source):
    here = pathlib.Path(__file__).parent
    # The first validation is that of the only step that is there by then.
    while source == "held-out" and not (here / "go-on").exists():
        (here / "asked").touch()
        time.sleep(0.05)
    return len(set(response)) / 4
"""


def test_a_validation_that_a_signal_ended_is_made_up_by_the_run_that_goes_on(runner: Runner) -> None:
    (runner.folder / "slow_validation.py").write_text(SLOW_VALIDATION)
    functions = [{"type": "custom", "function": "slow_validation:score"}]
    job = runner.write(
        copy_job(reward={"functions": functions}, validation={"atStart": False, "every": 1}, stop={"steps": 2})
    )
    output = runner.folder / "output"
    process = runner.start("run", job, "--output", output)
    wait_for((runner.folder / "asked").exists, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, printed
    [interrupted] = metrics_of(output)
    assert "validation/mean" not in interrupted

    (runner.folder / "go-on").touch()
    assert "resuming from the checkpoint of step 1" in runner.run("run", job, "--output", output)
    made_up, last = metrics_of(output)
    assert (made_up["step"], last["step"]) == (1, 2)
    assert made_up.keys() == last.keys()
    assert made_up.items() > {n: v for n, v in interrupted.items() if n != "time"}.items()
    for record in (made_up, last):
        rows = read_samples(samples_path(output, record["step"]))
        assert {row.source for row in rows} == {"held-out"}
        assert len(rows) == 8
        assert record["validation/mean"] == pytest.approx(sum(row.score or 0 for row in rows) / 8)


DIES_AFTER_A_CHECKPOINT = """
import os, signal, sys
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.cli import main

write = FolderCheckpoints.write

async def write_and_die(self, step, *arguments):
    await write(self, step, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)

FolderCheckpoints.write = write_and_die
sys.exit(main())
"""


@pytest.mark.integrity
def test_a_run_that_is_killed_right_after_a_checkpoint_misses_no_step_in_its_record(runner: Runner) -> None:
    job = runner.write(copy_job(validation={"atStart": False}))
    output = runner.folder / "output"
    runner.run("run", job, "--output", output, program=("-c", DIES_AFTER_A_CHECKPOINT), expect=-signal.SIGKILL)
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    runner.run("run", job, "--output", output)
    assert [r["step"] for r in metrics_of(output)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.integrity
def test_a_run_of_some_steps_is_the_beginning_of_the_job(runner: Runner) -> None:
    """Its learning rates are those of the whole job, even where that still warms up, and the next run goes on."""
    optimizer = {"learningRate": 1e-3, "warmupSteps": 3, "schedule": "linear"}
    document = copy_job(trainer={"optimizer": optimizer})
    del document["spec"]["data"]["validation"]
    job, output = runner.write(document), runner.folder / "output"
    assert "2 of 2 steps are done" in runner.run("run", job, "--output", output, "--steps", "2")
    # Of the weights before the first step, and of the last step, though neither is one of every ten.
    assert list(sample_files(output)) == [0, 2]
    assert json.loads((output / "summary.json").read_text())["total_steps"] == 2
    assert "6 of 6 steps are done" in runner.run("run", job, "--output", output)
    assert list(sample_files(output)) == [0, 2, 6]
    assert [len(read_samples(file)) for file in sample_files(output).values()] == [8, 8, 8]
    rates = [record["actor/learning_rate"] for record in metrics_of(output)]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 0.5e-3, 0.0])


@pytest.mark.integrity
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(runner: Runner) -> None:
    job = runner.write(copy_job(validation={"atStart": False}))
    output = runner.folder / "output"
    runner.run("run", job, "--output", output, "--steps", "4")
    damaged = next((output / "checkpoints" / "step-00000004" / "learner").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    printed = runner.run("run", job, "--output", output)
    assert "step-00000004 is damaged" in printed
    assert "resuming from the checkpoint of step 2" in printed
    assert [r["step"] for r in metrics_of(output)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for=[
        "[sync, two ranks, engine apart]",
        "[sync, two ranks that share rows]",
        "[one step off]",
        "[fully asynchronous, two engines]",
    ]
)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"placement": "separate", "trainer": {"replicas": 2}}, id="sync, two ranks, engine apart"),
        pytest.param({"trainer": {"replicas": 2}}, id="sync, two ranks with an engine each"),
        pytest.param(
            {
                "trainer": {"replicas": 2, "parallelism": {"context": 2}},
                "algorithm": {"preset": "ppo", "critic": {"learningRate": 1e-3}, "kl": {"inLoss": {"kind": "full"}}},
            },
            id="sync, two ranks that share rows",
        ),
        pytest.param({"pipeline": {"mode": "oneStepOff"}}, id="one step off"),
        pytest.param(
            {
                "pipeline": {"mode": "fullyAsync", "requireBatches": 2, "staleness": {"maxAge": 2}},
                "batch": {"samplesPerPrompt": 4, "miniBatchGroups": 4},
                "rollout": {"engine": "torch", "maxResponseTokens": 3, "replicas": 2},
            },
            id="fully asynchronous, two engines",
        ),
        pytest.param(
            {
                "algorithm": {"preset": "ppo", "critic": {"learningRate": 1e-3}},
                "batch": {"groups": 8, "samplesPerPrompt": 1, "epochs": 2},
            },
            id="actor and critic",
        ),
        pytest.param(
            {"algorithm": {"preset": "remax"}, "batch": {"groups": 8, "samplesPerPrompt": 1}}, id="greedy baseline"
        ),
    ],
)
def test_every_mode_and_placement_trains_within_its_age_bound(runner: Runner, changes: dict[str, Any]) -> None:
    job = runner.write(copy_job(**{"validation": {"atStart": False}, "stop": {"steps": 3}, **changes}))
    output = runner.folder / "output"
    runner.run("run", job, "--output", output)
    records = metrics_of(output)
    assert [r["step"] for r in records] == [1, 2, 3]
    mode = changes.get("pipeline", {}).get("mode", "sync")
    ages = [r["age/max"] for r in records]
    assert {"sync": ages == [0, 0, 0], "oneStepOff": ages == [0, 1, 1], "fullyAsync": max(ages) <= 2}[mode], ages
    waited = [r["timing/wait_prev_gen_seconds"] for r in records if "timing/wait_prev_gen_seconds" in r]
    # One stage around the other: they differ by two looks at the clock.
    expected = [r["timing/generate_seconds"] for r in records] if mode == "oneStepOff" else []
    assert waited == pytest.approx(expected, abs=0.01)
    summary = json.loads((output / "summary.json").read_text())
    assert ("wait_prev_gen" in summary["seconds_by_stage"]) == (mode == "oneStepOff")
    # Ranks and engines start before the first step.
    assert 0 < summary["seconds_by_stage"]["start"] < summary["seconds"]
    assert not any("timing/start_seconds" in record for record in records)
    counted = summary["ages"]
    assert max(map(int, counted["oldest"])) == max(ages)
    assert sum(counted["oldest"].values()) == summary["trained"]["groups"] == records[-1]["progress/groups"]
    assert sum(counted["tokens"].values()) == summary["response_tokens"]
    assert json.loads((output / "status.json").read_text())["ages"]["oldest"] == counted["oldest"]
    assert summary["dropped"] == {}
    apart = changes.get("placement") == "separate" or mode != "sync"
    own_weights = apart or "trainer" in changes
    distances = [r["mismatch/canary/max"] for r in records if "mismatch/canary/max" in r]
    assert len(distances) == (3 if own_weights else 0)  # after every publication
    assert all(distance < 1e-4 for distance in distances)
    pauses = [r["timing/publish_seconds/engine_pause"] for r in records if "timing/publish_seconds/transfer" in r]
    assert len(pauses) == (3 if apart else 0)
    assert all(0 < pause <= r["timing/publish_seconds"] for pause, r in zip(pauses, records, strict=False))


def test_a_job_that_cannot_run_is_refused_before_anything_is_made(runner: Runner) -> None:
    job = copy_job()
    job["spec"]["data"]["train"] = {"source": "missing.jsonl"}
    printed = runner.run("run", runner.write(job), "--output", runner.folder / "output", expect=64)
    assert "spec.data.train.source" in printed
    assert "missing.jsonl" in printed
    assert not (runner.folder / "output").exists()


def test_a_reward_that_raises_ends_the_run_with_its_sample_and_without_the_keys_that_it_names(runner: Runner) -> None:
    (runner.folder / "my_rewards.py").write_text(
        "import os\ndef score(response, **_):\n"
        "    raise KeyError('no such thing', os.environ['AWS_SECRET_ACCESS_KEY'])\n"
    )
    key = "wJalrXUtnFEMI/K7MDENG"
    job = copy_job(reward={"functions": [{"type": "custom", "function": "my_rewards:score"}]})
    output = runner.folder / "output"
    environment = {"AWS_SECRET_ACCESS_KEY": key}
    printed = runner.run("run", runner.write(job), "--output", output, expect=65, environment=environment)
    assert "my_rewards:score" in printed
    assert "no such thing" in printed
    assert json.loads((output / "summary.json").read_text())["outcome"] == "failed"
    assert "'***'" in printed
    assert key not in printed
    assert [path for path in output.rglob("*") if path.is_file() and key.encode() in path.read_bytes()] == []

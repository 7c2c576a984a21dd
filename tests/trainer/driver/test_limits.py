"""Limits of the mismatch: judged step by step, and in real runs whose engines sample at another temperature."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_runs import Runner, copy_job, metrics_of

from rljob_api.spec.algorithm import MismatchLimits
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.driver.limits import Limits, MismatchError, RollBackError, start_again

PROGRAM = (str(Path(__file__).parent / "wrong_sampler.py"),)
FINE = {"mismatch/kl": 0.01, "mismatch/chi_square": 0.02, "mismatch/effective_sample_size": 0.98}
FAR = FINE | {"mismatch/kl": 0.3}


class World:
    def __init__(self, **limits: Any) -> None:
        self.said: list[str] = []
        self.corrected = 0
        given = MismatchLimits(**({"kl": 0.1} | limits))
        self.limits = Limits(given, correct=self.correct, report=self.said.append)
        self.steps: Iterator[int] = iter(range(1, 1000))

    def correct(self) -> None:
        self.corrected += 1

    def look(self, *steps: dict[str, float]) -> dict[str, float]:
        return [self.limits.look(next(self.steps), metrics) for metrics in steps][-1]


def test_steps_within_the_limits_are_left_alone() -> None:
    world = World(chi_square=0.05, effective_sample_size=0.9)
    assert world.look(*[FINE] * 5)["mismatch/beyond_limits"] == 0
    assert (world.said, world.limits.sentence, world.limits.suspect) == ([], "", False)


def test_the_samples_that_are_most_apart_are_named() -> None:
    world = World(patience=1)
    world.limits.look(1, FAR, "sample 2 of prompt 17 by 0.9 nats")
    assert "too far apart: mismatch/kl 0.3 is above 0.1" in world.said[0]
    assert "(most of all sample 2 of prompt 17 by 0.9 nats)" in world.said[0]


@pytest.mark.parametrize(
    ("limits", "metrics", "words"),
    [
        ({"kl": 0.1}, {"mismatch/kl": 0.11}, "mismatch/kl 0.11 is above 0.1"),
        ({"kl": None, "chi_square": 0.5}, {"mismatch/chi_square": 3.0}, "mismatch/chi_square 3 is above 0.5"),
        ({"effective_sample_size": 0.5}, {"mismatch/effective_sample_size": 0.4},
         "mismatch/effective_sample_size 0.4 is below 0.5"),
        ({"kl": 0.1}, {"mismatch/kl": float("nan")}, "mismatch/kl (no number) is above 0.1"),
        ({"kl": 0.1}, {"drift/kl": 0.2, "drift/chi_square": 0.0, "drift/effective_sample_size": 1.0},
         "drift/kl 0.2 is above 0.1"),
    ],
)  # fmt: skip
def test_each_figure_has_its_limit(limits: dict[str, Any], metrics: dict[str, float], words: str) -> None:
    world = World(patience=1, **limits)
    world.look(FINE | metrics)
    assert world.limits.sentence == f"{words} (1 steps in a row)"
    assert words in world.said[0]


def test_patience_counts_steps_in_a_row_and_the_sentence_comes_again_seldom() -> None:
    world = World(patience=3)
    world.look(FAR, FAR, FINE, FAR, FAR)
    assert world.said == []
    world.look({})  # not judged: neither better nor worse
    world.look(FAR)
    assert len(world.said) == 1
    assert "step 7" in world.said[0]
    world.look(*[FAR] * 100)
    assert len(world.said) == 2


def test_the_correction_is_switched_on_once() -> None:
    world = World(action="correct", patience=2)
    assert world.look(FAR)["mismatch/correcting"] == 0
    assert world.look(FAR, FAR, FINE)["mismatch/correcting"] == 1
    assert world.corrected == 1
    again = World(action="correct", patience=1)
    again.limits.resumed(correcting=True)
    assert again.look(FAR)["mismatch/correcting"] == 1
    assert again.corrected == 0


def test_weights_are_suspect_from_the_first_step_beyond_a_limit() -> None:
    world = World(action="rollBack", patience=2)
    world.look(FAR)
    assert world.limits.suspect
    world.look(FINE)
    assert not world.limits.suspect
    world.look(FAR)
    with pytest.raises(RollBackError, match="2 steps in a row"):
        world.look(FAR)


def test_without_a_checkpoint_or_after_too_many_times_there_is_no_way_back(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=1)
    with pytest.raises(MismatchError, match="no checkpoint from before"):
        start_again(RollBackError("too far"), 1, 2, store, print)
    with pytest.raises(MismatchError, match="gone back 2 times"):
        start_again(RollBackError("too far"), 3, 2, store, print)


def job_with(limits: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Prompts 24 to 31 are the fourth step's."""
    algorithm = {
        "preset": "grpo",
        "kl": {"inLoss": {"coefficient": 0}},
        "rolloutCorrection": {"limits": limits},
    }
    batch = {"groups": 8, "samplesPerPrompt": 4}
    return copy_job(**{"algorithm": algorithm, "batch": batch, "validation": {"atStart": False}} | spec)


def wrong(**said: Any) -> dict[str, Any]:
    return {"program": PROGRAM, "environment": {"WRONG_SAMPLER": json.dumps({"temperature": 0.1} | said)}}


def test_a_run_rolls_back_to_before_the_breach_and_no_version_is_used_twice(runner: Runner) -> None:
    job = job_with(
        {"kl": 0.5, "effectiveSampleSize": 0.5, "action": "rollBack", "patience": 2},
        checkpoint={"everySteps": 1, "keep": 1},
        rollout={"engine": "torch", "maxResponseTokens": 3, "replicas": 1},
        placement="separate",
        stop={"steps": 7},
    )
    output = runner.folder / "output"
    printed = runner.run("run", runner.write(job), "--output", output, **wrong(first=24, last=39, times=1))
    # Steps 4 and 5 are wrong; a checkpoint of step 4 would have taken the place of that of step 3.
    assert "no checkpoint of step 4" in printed
    assert "back to the checkpoint of step 3 with new engines (1 of 2 times)" in printed
    records = metrics_of(output)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["mismatch/roll_backs"] for r in records] == [0, 0, 0, 1, 1, 1, 1]
    assert max(r["mismatch/kl"] for r in records) < 1e-6
    # Versions 1 to 4 were published before the breach was acted upon, step 5 publishes 5: 6 is the checkpoint's own.
    assert [r["progress/version"] for r in records] == [1, 2, 3, 7, 8, 9, 10]
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        assert [v for (v,) in ledger.execute("SELECT version FROM versions ORDER BY version")] == list(range(1, 11))
        states = dict(ledger.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        asked = dict(ledger.execute("SELECT ordinal, times_asked FROM groups"))
    assert states == {"trained": 56}
    assert len(asked) == 56
    events = json.loads((output / "timeline.json").read_text())["traceEvents"]
    assert "rolled back to step 3" in {event["name"] for event in events}
    assert json.loads((output / "summary.json").read_text())["resumed_from_step"] == 3


def test_a_run_that_goes_wrong_again_and_again_ends_with_a_clear_error(runner: Runner) -> None:
    job = job_with({"kl": 0.5, "action": "rollBack", "patience": 1, "rollBacks": 1}, checkpoint={"everySteps": 1})
    output = runner.folder / "output"
    printed = runner.run("run", runner.write(job), "--output", output, expect=65, **wrong(first=24))
    assert "(1 of 1 times)" in printed
    assert "gone back 1 times (limits.rollBacks), which did not help" in printed
    status = json.loads((output / "status.json").read_text())
    assert status["end"]["exitCode"] == 65
    assert status["mismatch"].startswith("mismatch/kl")
    # What is left is from before: the next attempt starts there.
    assert [path.name for path in sorted((output / "checkpoints").glob("step-*"))][-1] == "step-00000003"


def test_the_correction_is_switched_on_and_stays_on_after_a_resume(runner: Runner) -> None:
    job = runner.write(job_with({"kl": 0.5, "action": "correct", "patience": 2}, checkpoint={"everySteps": 1}))
    output = runner.folder / "output"
    printed = runner.run("run", job, "--output", output, "--steps", "6", **wrong(first=24))
    assert "step 5: engines and trainer are too far apart" in printed
    assert "importance weights correct for it from the next batch on" in printed
    runner.run("run", job, "--output", output, "--steps", "7", **wrong(first=24))
    records = {r["step"]: r for r in metrics_of(output)}
    assert [records[step]["mismatch/correcting"] for step in (4, 5, 6, 7)] == [0, 1, 1, 1]
    # Only a corrected batch has weights; they are cut at 2.
    assert ["rollout_correction/weight/max" in records[step] for step in (4, 5, 6, 7)] == [False, False, True, True]
    assert records[6]["rollout_correction/weight/max"] == pytest.approx(2.0)
    assert records[6]["rollout_correction/k3_kl"] == pytest.approx(records[6]["mismatch/kl"], rel=1e-4)

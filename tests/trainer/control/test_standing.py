"""What status and live view say of one moment: of the trainer, of each engine, and of engines that do the same."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_trainer.commands.status import lines
from rljob_trainer.control.standing import RunStanding
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.run import RunOptions
from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.group import Scoring
from rljob_trainer.episodes.requests import GenerationResult, SamplingSettings
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.pools.members import Standing
from rljob_trainer.rewards.standing import ScorerStanding, ScoringPools
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.validation.validator import HeldOut, Validator
from rljob_trainer.waits import Waits

SCORED = {"functions": [{"type": "rewardModel", "rewardModel": {"source": "scores"}}]}


def engine(name: str, running: int = 0, seconds: float = 0.0, state: Any = "serving") -> Standing:
    return Standing(name, None, state, running, seconds)


def standing_of(waits: Waits, *engines: Standing, paused: bool = False, times: StageTimes | None = None) -> RunStanding:
    [job] = load_jobs(yaml.safe_dump(copy_job()))
    end: Any = SimpleNamespace(total_steps=10)
    steering: Any = SimpleNamespace(generation=0, attempt=1, schedule=None)
    standing = RunStanding(resolve(job), end, Path(), steering, times or StageTimes(), waits)
    pool: Any = SimpleNamespace(standings=lambda: list(engines), paused=paused, queued=0, version=3)
    standing.built(pool, None, 1)
    return standing


def test_before_there_are_parts_the_run_is_starting_and_not_between_two_steps() -> None:
    times = StageTimes()
    standing = standing_of(Waits(lambda: 0.0), times=times)
    assert standing.status().doing == "the trainer is between steps"
    standing.taken_down()
    assert standing.status().doing.startswith("the run is starting")
    with times.stage("start"):
        assert standing.status().doing.startswith("the run is starting")


def test_engines_that_do_the_same_share_a_line() -> None:
    waits = Waits(lambda: 0.0)
    alike = standing_of(waits, engine("0", 4, 3), engine("1", 8, 38), engine("2", 1, 2)).present()
    assert alike.engines == ["engines 0, 1, 2 work on 13 requests, the oldest for 38 s on engine 1"]
    many = standing_of(waits, *(engine(str(number), 1, number) for number in range(40))).present()
    assert many.engines == ["40 engines work on 40 requests, the oldest for 39 s on engine 39"]
    prompts = "prompts: the trainer already has as many groups ahead as the schedule allows"
    mixed = standing_of(waits, engine("0", 4, 3), engine("1"), engine("2")).present()
    assert mixed.engines == ["engine 0 works on 4 requests, the oldest for 3.0 s", f"engines 1, 2 wait for {prompts}"]


def test_an_engine_that_joins_says_what_itself_waits_for_and_the_trainer_what_the_run_waits_for() -> None:
    now = 0.0
    waits = Waits(lambda: now)
    standing = standing_of(
        waits, engine("0", 4, 3), engine("1", state="joining"), engine("2", state="lent"), engine("3")
    )
    with (
        waits.wait("trainer", "12/32 samples", 3600),
        waits.wait("engine 1", "weights: the learner is busy", 600),
        waits.wait("rollout", "2 groups in reward functions"),
    ):
        now = 38.0
        present, status = standing.present(), standing.status()
    assert present.doing == status.doing == "trainer waits for 12/32 samples (38 s so far, times out in 59 min 22 s)"
    said = "waits for weights: the learner is busy (38 s so far, times out in 9 min 22 s)"
    assert status.pools.rollout.engines[1].doing == said
    assert present.engines[:2] == ["engine 0 works on 4 requests, the oldest for 3.0 s", f"engine 1 {said}"]
    assert present.engines[2] == "other engines: see rljob status"
    assert [(wait.who, wait.reason) for wait in status.beside] == [("rollout", "2 groups in reward functions")]


def test_with_one_engine_status_says_that_the_trainer_waits_for_validation() -> None:
    """No publication and no step begins meanwhile."""

    class Pool:
        async def generate(self, requests: Any) -> list[GenerationResult]:
            await asyncio.sleep(100)
            raise AssertionError

        def waiting_for(self) -> str:
            return "oldest running 38 s on engine 0"

    class Rewards:
        async def score(self, group: Group) -> list[RewardResult]:
            raise AssertionError

    async def main() -> None:
        waits = Waits(asyncio.get_running_loop().time)
        prompts = [Prompt(number, 0, number, "held-out", "", (1,), None) for number in range(9)]
        sets = [HeldOut("held-out", prompts, 1, SamplingSettings(max_tokens=3))]
        scoring = Scoring(Rewards(), lambda texts: texts)
        validator = Validator(
            SingleTurn(), Pool(), scoring, sets, seed=0, bootstrap=0, waits=waits, patience_seconds=600
        )
        standing = standing_of(waits, engine("0", 9, 38))
        validating = asyncio.create_task(validator.run())
        await asyncio.sleep(60)
        said = (
            "trainer waits for validation: 0 of 9 prompts scored; oldest running 38 s on engine 0 "
            "(1 min 00 s so far, times out in 9 min 00 s)"
        )
        assert standing.status().doing == standing.present().doing == said
        validating.cancel()

    run_virtual(main())


def test_a_run_that_a_signal_has_ended_was_interrupted_and_says_how_it_goes_on() -> None:
    options = RunOptions(Path("run"), Path())
    ending = Ending("stopped", "SIGINT at step 21", signal.SIGINT)
    standing = standing_of(Waits(lambda: 0.0))
    standing.ended("failed", ending.reason, ending.exit_code, told=ending.told, onwards=options.onwards(saved=True))
    said = "the run has ended: interrupted, SIGINT at step 21; the same command continues the run"
    assert standing.status().doing == said
    never = replace(options, resume="never")
    assert never.onwards(saved=True) == "the same command without --resume continues the run"
    assert never.onwards(saved=False) == "nothing was saved yet: the same command starts over"
    assert replace(options, keeps_state=False).onwards(saved=True) == ""
    assert replace(options, storage=Path("/mnt")).onwards(saved=False) == "the next attempt starts over"


def test_the_pool_of_reward_models_is_told_in_status_and_metrics() -> None:
    gone = SimpleNamespace(name="1", pod="pod-b")
    scorers: Any = SimpleNamespace(
        wanted=3,
        waiting=7,
        drained=[gone],
        standings=lambda: [
            ScorerStanding("0", "pod-a", "serving", 12, 2.0),
            ScorerStanding("2", "pod-c", "serving", 0, 0.0),
            ScorerStanding("3", None, "starting", 0, 0.0),
            ScorerStanding("4", "pod-d", "leaving", 1, 0.5),
        ],
    )
    [job] = load_jobs(yaml.safe_dump(copy_job(reward=SCORED, rewardModel={"replicas": 3})))
    end: Any = SimpleNamespace(total_steps=10)
    steering: Any = SimpleNamespace(generation=0, attempt=1, schedule=None)
    standing = RunStanding(resolve(job), end, Path(), steering, StageTimes(), Waits())
    before = standing.status().pools.reward_model
    assert before is not None
    assert (before.desired, before.ready, before.replicas) == (3, 0, ())
    rollout: Any = SimpleNamespace(standings=list, paused=False, queued=0, version=3)
    standing.built(rollout, None, 1, ScoringPools(reward_model=scorers))
    assert standing.status().pools.judge is None
    told = standing.status().pools.reward_model
    assert told is not None
    assert (told.desired, told.ready, told.waiting) == (3, 2, 7)
    assert [(replica.name, replica.pod, replica.state, replica.safe_to_delete) for replica in told.replicas] == [
        ("0", "pod-a", "serving", False),
        ("2", "pod-c", "serving", False),
        ("3", None, "starting", False),
        ("4", "pod-d", "draining", False),
        ("1", "pod-b", "drained", True),
    ]
    assert told.replicas[0].doing == "scores 12 samples for 2.0 s"
    printed = list(lines(standing.status(), datetime.now(UTC)))
    assert "reward model 0 in pod-a: serving, scores 12 samples for 2.0 s" in printed
    samples = {line for line in standing.metrics().splitlines() if line.startswith("rljob_reward_model")}
    assert samples == {
        'rljob_reward_models{job="tiny",state="serving"} 2.0',
        'rljob_reward_models{job="tiny",state="starting"} 1.0',
        'rljob_reward_models{job="tiny",state="draining"} 1.0',
        'rljob_reward_model_samples{job="tiny",state="waiting"} 7.0',
        'rljob_reward_model_samples{job="tiny",state="running"} 13.0',
    }


def test_a_judges_engines_are_told_in_status_and_metrics() -> None:
    judges: Any = SimpleNamespace(
        wanted=2,
        waiting=3,
        drained=[],
        standings=lambda: [
            ScorerStanding("judge-0", "pod-a", "serving", 5, 2.0),
            ScorerStanding("judge-1", None, "starting", 0, 0.0),
        ],
    )
    judged = {"functions": [{"type": "judge", "judge": {"template": "{response}"}}]}
    [job] = load_jobs(yaml.safe_dump(copy_job(reward=judged, judge={"model": {"source": "judge"}, "replicas": 2})))
    end: Any = SimpleNamespace(total_steps=10)
    steering: Any = SimpleNamespace(generation=0, attempt=1, schedule=None)
    standing = RunStanding(resolve(job), end, Path(), steering, StageTimes(), Waits())
    before = standing.status().pools.judge
    assert before is not None
    assert (before.desired, before.ready, before.replicas) == (2, 0, ())
    rollout: Any = SimpleNamespace(standings=list, paused=False, queued=0, version=3)
    standing.built(rollout, None, 1, ScoringPools(judge=judges))
    told = standing.status().pools.judge
    assert told is not None
    assert (told.desired, told.ready, told.waiting) == (2, 1, 3)
    printed = list(lines(standing.status(), datetime.now(UTC)))
    assert "engine judge-0 in pod-a: serving, answers 5 questions for 2.0 s" in printed
    assert "engine judge-1: starting, waits for a slot in the cluster, its process and its model" in printed
    assert {line for line in standing.metrics().splitlines() if line.startswith("rljob_judge")} == {
        'rljob_judges{job="tiny",state="serving"} 1.0',
        'rljob_judges{job="tiny",state="starting"} 1.0',
        'rljob_judge_questions{job="tiny",state="waiting"} 3.0',
        'rljob_judge_questions{job="tiny",state="running"} 5.0',
    }

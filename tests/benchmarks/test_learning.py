"""The learning benchmark: its jobs are valid, its list is complete, and what was measured is not measured again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from benchmarks.learning import sampler
from benchmarks.learning.__main__ import show_corrections, show_methods
from benchmarks.learning.methods import CORRECTIONS, METHODS, SAMPLERS, Case, Study, cases
from benchmarks.learning.runs import Learned, Task, job_of, keep, kept

from rljob_api import check
from rljob_api.methods import Estimator
from rljob_api.resolution import resolve
from rljob_api.resolved import ResolvedSpec
from rljob_trainer.episodes import group
from rljob_trainer.episodes.single_turn import SingleTurn

STUDIES: tuple[Study, ...] = ("methods", "corrections")


def spec_of(case: Case, task: Task = "copy") -> ResolvedSpec:
    job, wrong = check(job_of(case, task))
    assert wrong == [], case
    assert job is not None
    return resolve(job).spec


def learned(case: Case, rewards: list[float], reached: int | None) -> Learned:
    return Learned(case.study, case.name, case.sampler, case.seed, "copy", rewards, 1, [], reached, rewards[-1], 12.0)


@pytest.mark.parametrize("task", get_args(Task))
@pytest.mark.parametrize("study", STUDIES)
def test_every_job_is_valid_and_trains_on_as_many_sequences(study: Study, task: Task) -> None:
    for case in cases(study, [1], None):
        spec = spec_of(case, task)
        assert spec.batch.mini_batch_groups * spec.batch.samples_per_prompt == 128
        assert spec.seed == 1


@pytest.mark.parametrize(
    ("own", "replaced"), [(sampler.tasks_of, group.tasks_of), (sampler.WrongLogProbs.play, SingleTurn.play)]
)
def test_what_the_wrong_sampler_replaces_takes_the_same(own: Callable[..., Any], replaced: Callable[..., Any]) -> None:
    assert list(inspect.signature(own).parameters) == list(inspect.signature(replaced).parameters)


def test_every_estimator_is_there() -> None:
    there = {spec_of(case).algorithm.advantage.estimator for case in cases("methods", [1], None)}
    assert there == set(get_args(Estimator))


def test_old_samples_come_from_a_pipeline_that_lets_them_grow_old() -> None:
    spec = spec_of(Case("corrections", "bypass", 1, "4 versions old"))
    assert (spec.pipeline.mode, spec.pipeline.staleness.max_age, spec.batch.groups) == ("fullyAsync", 4, 64)


def test_what_is_there_is_found_again_and_nothing_else(tmp_path: Path) -> None:
    case = Case("corrections", "bypass", 1, "5 % wrong log-probs")
    assert kept(case, "copy", tmp_path) is None
    result = learned(case, [0.1, 0.95], 2)
    keep(result, case, "copy", tmp_path)
    assert kept(case, "copy", tmp_path) == result
    for other in (Case("corrections", "bypass", 2, "5 % wrong log-probs"), Case("corrections", "none", 1)):
        assert kept(other, "copy", tmp_path) is None
    assert kept(case, "addition", tmp_path) is None
    names = {path.name for study in STUDIES for c in cases(study, [1, 2, 3], None) for path in [_kept_as(c, tmp_path)]}
    assert len(names) == 3 * (len(METHODS) + len(CORRECTIONS) * len(SAMPLERS))


def _kept_as(case: Case, folder: Path) -> Path:
    own = folder / "own"
    keep(learned(case, [0.5], None), case, "copy", own)
    (path,) = own.iterdir()
    return path.rename(folder / path.name)


def test_tables_say_how_many_seeds_reached_the_goal() -> None:
    rows = [
        learned(Case("methods", "grpo", 1), [0.9], 30),
        learned(Case("methods", "grpo", 2), [0.96], 50),
        learned(Case("methods", "grpo", 3), [0.4], None),
    ]
    assert "| grpo | 2 of 3 | 40 (30 – 50) | 0.900 (0.400 – 0.960) | 12 (12 – 12) |" in show_methods(rows)
    never = [learned(Case("corrections", "none", 1, "temperature 1.5"), [0.2], None)]
    assert "| temperature 1.5 | none | 0 of 1 | never |" in show_corrections(never)

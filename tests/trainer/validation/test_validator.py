"""A validation as one number, which ends runs (``stop.reward``) and which people read."""

from __future__ import annotations

import random

import pytest
from virtual_engine import VirtualEngine

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.group import Scoring
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.validation.validator import HeldOut, HeldOutScores, Validator


class Partial:
    """0.75 for an answer that is wrong, of the set "judged"; of the others nobody says what is correct."""

    async def score(self, group: Group) -> list[RewardResult]:
        right = group.prompt.ordinal == 0
        judged = right if group.prompt.source == "judged" else None
        return [RewardResult(1.0 if right else 0.75, correct=judged) for _ in group.episodes]


def held_out(name: str, prompts: int) -> HeldOut:
    asked = [Prompt(number, 0, number, name, "", (1,), None) for number in range(prompts)]
    return HeldOut(name, asked, 2, SamplingSettings(max_tokens=3))


async def validated(*sets: HeldOut) -> HeldOutScores:
    pool, engine = RolloutPool(), VirtualEngine("0", random.Random(0), 1.0, 0, 0.0)
    pool.add(engine)
    pool.activate([engine.name])
    scoring = Scoring(Partial(), lambda texts: [""] * len(texts))
    scores = await Validator(SingleTurn(), pool, scoring, sets, seed=0, bootstrap=0).run()
    await pool.close()
    return scores


def test_it_is_the_share_of_correct_answers_whatever_wrong_ones_earn() -> None:
    scores = run_virtual(validated(held_out("judged", 4)))
    assert scores.mean == scores.metrics["validation/mean"] == 0.25
    assert scores.metrics["validation/judged/score/mean@2"] == pytest.approx(0.8125)


def test_it_is_the_score_where_nobody_says_what_is_correct_and_each_set_weighs_the_same() -> None:
    scores = run_virtual(validated(held_out("judged", 4), held_out("scored", 2)))
    assert scores.mean == scores.metrics["validation/mean"] == pytest.approx((0.25 + 0.875) / 2)

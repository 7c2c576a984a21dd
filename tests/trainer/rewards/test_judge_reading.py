"""Scores in what a judge says, and how often it may be asked."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from rljob_api.spec.judge import JudgeParser
from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.judge import reading
from rljob_trainer.rewards.judge.limits import MinuteLimits
from rljob_trainer.rewards.judge.reading import NoScoreError, score_in

LABELS = [
    {"label": "Correct", "score": 1},
    {"label": "partly correct", "score": 0.5},
    {"label": "incorrect", "score": -1},
]
NUMBER = {"low": 1, "high": 5, "scale": False}
JSON = {"type": "json", "field": "score"}
PATTERN = {"type": "pattern", "pattern": r"Rating: \[\[(.*?)\]\]"}


@pytest.mark.parametrize(
    ("parser", "said", "score"),
    [
        ({}, "Good.\nScore: 7", 0.7),
        ({}, "7/10", 0.7),
        ({}, "**Score:** 7.5 out of 10.\n\n", 0.75),
        ({}, "10", 1.0),
        ({}, "Of 3 points:\n0", 0.0),
        (NUMBER, "4", 4.0),
        ({"low": -1, "high": 1}, "-0.5", 0.25),
        (PATTERN, "Rating: [[3]] was my first thought. Rating: [[8]]", 0.8),
        ({**PATTERN, "labels": LABELS}, "Rating: [[Partly  correct]]", 0.5),
        (JSON, 'So: {"why": "{", "score": 6}', 0.6),
        (JSON, '```json\n{"score": 2}\n```\nOr:\n```\n{"score": "3"}\n```', 0.3),
        ({"type": "json", "field": "ok"}, '{"ok": true}', 1.0),
        ({"type": "json", "field": "ok"}, '{"ok": false}', 0.0),
        ({**JSON, "labels": LABELS}, '{"score": "INCORRECT"}', -1.0),
        ({"type": "label", "labels": LABELS}, "It is right.\nVerdict: **Correct**.", 1.0),
        ({"type": "label", "labels": LABELS}, "incorrect", -1.0),
    ],
)
def test_scores(parser: dict[str, object], said: str, score: float) -> None:
    assert score_in(said, JudgeParser.model_validate(parser)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("parser", "said", "problem"),
    [
        ({}, "", "it was empty"),
        ({}, "Score: 7\nThat is all.", "has no numbers"),
        ({}, "Between 6 and 8", "has 2 numbers"),
        ({}, "7/12", "has 2 numbers"),
        ({}, "11", "11 is outside 0 to 10"),
        ({}, "-1", "-1 is outside 0 to 10"),
        ({}, "v1.2.3", "has no numbers"),
        ({}, "1,000", "has no numbers"),
        (PATTERN, "Rating: 8", "does not match"),
        (PATTERN, "Rating: [[eight]]", "'eight' is not a number"),
        (PATTERN, "Rating: [[nan]]", "'nan' is not a number"),
        (JSON, "score: 7", "no JSON object"),
        (JSON, '{"points": 7}', "no field 'score'"),
        (JSON, '{"score": [7]}', "is not a number"),
        (JSON, '{"score": NaN}', "nan is outside 0 to 10"),
        (JSON, '{"score": null}', "is not a number"),
        ({"type": "label", "labels": LABELS}, "Verdict: not correct", "'not correct' is not one of the labels"),
        ({"type": "label", "labels": LABELS}, "correct\nor incorrect", "is not one of the labels"),
    ],
)
def test_what_leaves_a_doubt_is_no_score(parser: dict[str, object], said: str, problem: str) -> None:
    with pytest.raises(NoScoreError, match=problem):
        score_in(said, JudgeParser.model_validate(parser))


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_no_minute_has_more_than_the_limits(seed: int) -> None:
    """All minutes that begin with a request, counted one by one."""
    chance, clock = random.Random(seed), Clock()
    limits = MinuteLimits(7, 1000, clock, clock.sleep)
    begun: list[tuple[float, int]] = []

    async def one() -> None:
        tokens = chance.choice((10, 100, 300, 999))
        spent = await limits.begin(tokens)
        if chance.random() < 0.5:
            tokens = chance.randrange(tokens + 1)
            spent.counted(tokens)
        begun.append((clock.now, tokens))
        clock.now += chance.random() * 5

    await asyncio.gather(*(one() for _ in range(60)))
    assert limits.waiting == 0
    assert len(begun) == 60
    for start, _ in begun:
        within = [tokens for at, tokens in begun if start <= at < start + 60]
        assert len(within) <= 7
        assert sum(within) <= 1000
    # And no idle time: 60 requests of at most 7 a minute, or of so many tokens.
    assert clock.now - 1000 <= 60 * (60 + 5)


async def test_first_come_first_served_and_a_pause_holds_for_all() -> None:
    clock = Clock()
    limits = MinuteLimits(2, None, clock, clock.sleep)
    order: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        await limits.begin(1)
        order.append((number, clock.now))

    await asyncio.gather(*map(one, range(5)))
    assert order == [(0, 1000), (1, 1000), (2, 1060), (3, 1060), (4, 1120)]
    limits.hold(500)
    await one(5)
    assert order[-1] == (5, 1620)


async def test_a_request_larger_than_the_limit_has_a_minute_of_its_own() -> None:
    clock = Clock()
    limits = MinuteLimits(None, 100, clock, clock.sleep)
    times = []
    for tokens in (50, 500, 50):
        await limits.begin(tokens)
        times.append(clock.now)
    assert [later - earlier for earlier, later in itertools.pairwise(times)] == [60, 60]


def test_a_pattern_that_takes_time_exponential_in_the_text_ends_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_SECONDS", 0.05)
    parser = JudgeParser.model_validate({"type": "pattern", "pattern": "((?:a|aa)+)$"})
    with pytest.raises(NoScoreError, match=r"matching the pattern took longer than 0.05 s"):
        score_in("a" * 60 + "b", parser)


@pytest.mark.parametrize("said", ["1" * 65536, "1." * 32768, "1" + 65000 * " " + "2", "1 " * 32768])
def test_numbers_are_read_in_time_linear_in_the_text(said: str) -> None:
    """A search that begins anew at each digit takes a minute for the first of these."""
    with pytest.raises(NoScoreError):
        score_in(said, JudgeParser.model_validate({}))


def test_a_pattern_that_cannot_be_read_is_told_at_the_start() -> None:
    # One that the API has let through: it asks Python's re.
    parser = JudgeParser.model_construct(type="pattern", pattern="(a")
    with pytest.raises(JobFileError, match=r"^functions\[0\]\.judge\.parser\.pattern: not a valid pattern"):
        reading.check_pattern(parser, "functions[0]")

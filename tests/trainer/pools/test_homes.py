"""Who has an episode's keys and values, and what was computed again, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.tokens import NOTHING, Tokens
from rljob_trainer.pools.homes import Homes, goes_home


def asked(prompt: int, turn: int = 0, begun: Tokens = NOTHING, sample: int = 0) -> GenerationRequest:
    return GenerationRequest(
        EpisodeId("training", 7, sample, turn), (1,) * prompt, SamplingSettings(max_tokens=100), 0, begun
    )


def made(versions: Sequence[int]) -> Tokens:
    count = len(versions)
    return Tokens.sampled(np.zeros(count, np.int32), np.zeros(count, np.float32), np.array(list(versions), np.int32))


def answer(homes: Homes, request: GenerationRequest, tokens: Tokens, prefilled: int, engine: str = "0") -> None:
    homes.sent(request, engine)
    homes.answered(request, GenerationResult(request.id, tokens, "stop", prefilled=prefilled))


def ratios(homes: Homes) -> tuple[float, float]:
    counts = homes.take_counts()
    return counts["rollout/recomputed_ratio"], counts["rollout/recomputed_ratio/forced"]


def test_turns_of_an_episode_and_what_was_interrupted_have_the_same_home() -> None:
    homes = Homes()
    assert homes.of(asked(10)) is None
    homes.sent(asked(10), "a")
    homes.sent(asked(10, sample=1), "b")
    assert homes.of(asked(30, turn=1)) == "a"
    assert homes.of(asked(10, begun=made([0]))) == "a"
    assert homes.of(asked(30, turn=1, sample=1)) == "b"
    assert homes.of(replace(asked(10), id=EpisodeId("validation set x", 7, 0))) is None
    homes.sent(asked(30, turn=1), "c")
    assert homes.of(asked(40, turn=2)) == "c"


def test_at_home_nothing_is_computed_again_and_elsewhere_all_that_was() -> None:
    homes = Homes()
    answer(homes, asked(10), made([0] * 20), prefilled=10)
    # 15 tokens are new; of the last one that was made nothing had been computed.
    answer(homes, asked(45, turn=1), made([0] * 20), prefilled=16)
    assert ratios(homes) == (0, 0)
    answer(homes, asked(70, turn=2), made([0] * 10), prefilled=70, engine="1")
    assert ratios(homes) == (64 / 10, 0)
    assert homes.take_counts() == {}


def test_an_interrupted_request_that_goes_on_elsewhere_computes_what_it_had_again() -> None:
    homes = Homes()
    answer(homes, asked(10), made([0] * 20), prefilled=10)
    # Aborted and sent on: thirty tokens, of which the last was never computed.
    answer(homes, asked(10, begun=made([0] * 20)), made([0] * 30), prefilled=30, engine="1")
    assert ratios(homes) == (29 / 30, 0)
    # What comes back as it went was not computed at all.
    answer(homes, asked(10, begun=made([0] * 30)), made([0] * 30), prefilled=0)
    assert homes.take_counts() == {}


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_publications_force_is_told_apart(recomputes: bool) -> None:
    homes = Homes(recomputes=recomputes)
    # After the fifth token, and after the eighth: ten of the prompt and those.
    answer(homes, asked(10), made([0] * 5 + [1] * 3 + [2] * 2), prefilled=10)
    again = (10 + 5) + (10 + 8) if recomputes else 0
    assert ratios(homes) == (again / 10, again / 10)
    # A version later the cache has nothing of the turn before: at home or not, that was to be expected.
    answer(homes, asked(30, turn=1), made([3] * 10), prefilled=30)
    assert ratios(homes) == (19 / 10, 19 / 10)


def test_what_an_engine_shares_among_siblings_counts_for_none_of_them() -> None:
    homes = Homes()
    answer(homes, asked(50), made([0] * 10), prefilled=50)
    answer(homes, asked(50, sample=1), made([0] * 10), prefilled=2)
    assert ratios(homes) == (0, 0)


@pytest.mark.parametrize(
    ("home", "least", "own", "goes"),
    [(100, 100, 10, True), (109, 100, 10, True), (150, 100, 10, True), (151, 100, 10, False), (30, 0, 40, True)],
)
def test_a_home_that_has_too_much_to_do_is_left(home: int, least: int, own: int, goes: bool) -> None:
    assert goes_home(home, least, own) is goes


def test_a_name_that_comes_again_is_another_episode() -> None:
    """Of a validation, whose rounds ask for the same prompts by other weights."""
    homes = Homes()
    answer(homes, asked(10), made([0] * 20), prefilled=10)
    assert homes.of(asked(10)) is None
    answer(homes, asked(10), made([5] * 20), prefilled=10, engine="1")
    assert ratios(homes) == (0, 0)
    assert homes.of(asked(40, turn=1)) == "1"


def test_an_answer_that_is_shorter_than_what_it_began_with_counts_nowhere() -> None:
    homes = Homes()
    answer(homes, asked(10, begun=made([0] * 5)), NOTHING, prefilled=0)
    assert homes.take_counts() == {}

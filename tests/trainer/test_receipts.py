"""A response that is not what its engine made, or not what was asked for, is refused with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rljob_trainer.episodes.episode import single_turn
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.receipts import ReceiptError, Receipts, check_answer, check_episode
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.tokens import Tokens

pytestmark = pytest.mark.integrity

REQUEST = GenerationRequest(
    EpisodeId(TRAINING, 5, 1), (3, 4, 5), SamplingSettings(temperature=0.8, max_tokens=4), seed=11
)
Change = Callable[[GenerationResult], None]


def answer(request: GenerationRequest = REQUEST) -> GenerationResult:
    """What an engine answers, with its receipt."""
    ids = np.array([7, 8, 9], np.int32)
    result = GenerationResult(request.id, Tokens.sampled(ids, -0.5 * ids.astype(np.float32), ids * 0 + 2), "length")
    receipts = Receipts()
    receipts.take(request)
    receipts.write([result])
    return result


def test_what_arrives_as_it_was_made_is_taken() -> None:
    check_answer(REQUEST, answer())


def test_a_sum_that_stays_the_same_does_not_hide_a_swap() -> None:
    result = answer()
    result.tokens = replace(result.tokens, log_probs=result.tokens.log_probs[[1, 0, 2]])
    with pytest.raises(ReceiptError, match="the log-probs of sample 1 of prompt 5 differ from those that its engine"):
        check_answer(REQUEST, result)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (replace(REQUEST, sampling=SamplingSettings(1.0, max_tokens=4)), "sampled at temperature 1, not at 0.8"),
        (replace(REQUEST, seed=12), "the wrong seed"),
        (replace(REQUEST, prompt_ids=(3, 4, 6)), "generated for another prompt"),
        (
            replace(REQUEST, id=EpisodeId(TRAINING, 5, 2)),
            "sample 1 of prompt 5 holds the response of sample 2 of prompt 5",
        ),
    ],
)
def test_a_request_that_changed_on_its_way_is_named(asked: GenerationRequest, words: str) -> None:
    with pytest.raises(ReceiptError, match=words):
        check_answer(REQUEST, answer(asked))


def test_a_doubled_response_is_refused_before_training() -> None:
    result = answer()
    twice = Tokens.joined([result.tokens, result.tokens])
    with pytest.raises(ReceiptError, match="the token ids of sample 1 of prompt 5"):
        check_episode(single_turn(REQUEST.id, REQUEST.prompt_ids, twice, "stop", receipt=result.receipt))

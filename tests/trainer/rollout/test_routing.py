"""The experts that an engine's routers chose, at the tokens that they belong to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.episodes.tokens import NOTHING, Tokens
from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.routing import with_experts, without_experts


def experts(tokens: int, first: int = 0) -> np.ndarray:
    """``[tokens, 2, 2]``: each has the number of its token, and that and a hundred."""
    return np.array([[[n, n + 100]] * 2 for n in range(first, first + tokens)], np.uint8).reshape(tokens, 2, 2)


def made(count: int) -> Tokens:
    return Tokens.sampled(np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32))


def asked(prompt: int, begun: Tokens = NOTHING) -> GenerationRequest:
    return GenerationRequest(EpisodeId("training", 0, 0), (1,) * prompt, SamplingSettings(), 0, begun)


def test_a_token_has_the_choices_of_the_pass_before_it() -> None:
    begun, told = with_experts(asked(4), made(3), experts(6))
    assert begun is NOTHING
    np.testing.assert_array_equal(told.routed_experts, experts(3, first=3))
    np.testing.assert_array_equal(told.prompt_experts, experts(3))
    # A GPU may have computed one token more.
    assert np.array_equal(with_experts(asked(4), made(3), experts(7))[1].routed_experts, told.routed_experts)


def test_what_was_interrupted_keeps_the_first_choices_of_its_prompt_and_its_tokens() -> None:
    first = replace(made(3), routed_experts=experts(3, first=50), prompt_experts=experts(3, first=60))
    begun, told = with_experts(asked(4, first), made(2), experts(8))
    assert begun is first
    np.testing.assert_array_equal(told.routed_experts, experts(2, first=6))
    bare = replace(first, prompt_experts=None)
    np.testing.assert_array_equal(with_experts(asked(4, bare), made(2), experts(8))[0].prompt_experts, experts(3))


def test_what_was_sampled_where_nothing_was_told() -> None:
    begun, _ = with_experts(asked(4, made(3)), made(2), experts(8))
    np.testing.assert_array_equal(begun.routed_experts, experts(3, first=3))
    # It was interrupted before it was read again: nothing is known, and it is not lost.
    begun, told = with_experts(asked(4, made(3)), made(0), experts(0))
    assert len(begun) == 3
    assert begun.routed_experts is not None
    assert begun.routed_experts.shape == (3, 2, 2)
    assert not begun.routed_experts.any()
    assert len(Tokens.joined([begun, told])) == 3
    assert without_experts(begun).routed_experts is None


def test_choices_that_are_missing_are_noticed() -> None:
    with pytest.raises(EngineError, match=r"the experts of 5 tokens .* but computed 6"):
        with_experts(asked(4), made(3), experts(5))

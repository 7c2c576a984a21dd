"""Tokens with every stream that there can be cross each border whole, and what is not whole is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from small_episodes import named, same_tokens

from rljob_trainer.episodes.episode import Episode, Leaf
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.receipts import ReceiptError, Receipts, check_answer, check_episode, receipt_of
from rljob_trainer.episodes.record import CallPlace, RecordedCall, RecordedTurn, What
from rljob_trainer.episodes.requests import (
    BegunTurn,
    GenerationRequest,
    GenerationResult,
    SamplingSettings,
    continued,
)
from rljob_trainer.episodes.tokens import NOTHING, Tokens, is_constant, stream_types
from rljob_trainer.record import unfinished
from rljob_trainer.rollout.columns import Requests, Results
from rljob_trainer.rollout.shelf import Shelf

pytestmark = pytest.mark.integrity

REQUEST = GenerationRequest(named("a"), (1, 2), SamplingSettings(max_tokens=4000), seed=3)


def whole(count: int, seed: int = 0) -> Tokens:
    """Every stream of ``Tokens``, also those that nobody makes yet, with numbers that are nowhere alike."""
    rng = np.random.default_rng(seed)
    return Tokens(
        ids=rng.integers(0, 1000, count, dtype=np.int32),
        log_probs=-rng.random(count, dtype=np.float32),
        versions=np.sort(rng.integers(0, 9, count, dtype=np.int32)),
        mask=rng.random(count) < 0.7,
        routed_experts=rng.integers(0, 128, (count, 3, 2), dtype=np.uint8),
        prompt_experts=rng.integers(0, 128, (7, 3, 2), dtype=np.uint8),
    )


def through_a_message(tokens: Tokens, _: Path) -> Tokens:
    results = Results([GenerationResult(named(name), tokens, "stop") for name in "ab"])
    return pickle.loads(pickle.dumps(results))[1].tokens


def through_a_request(tokens: Tokens, _: Path) -> Tokens:
    requests = Requests([REQUEST, replace(REQUEST, begun=tokens)])
    begun: Tokens = pickle.loads(pickle.dumps(Requests(requests[1:])))[0].begun
    return begun


def through_the_shelf(tokens: Tokens, folder: Path) -> Tokens:
    return Shelf(folder, least_bytes=1).put(tokens)


def through_a_checkpoint(tokens: Tokens, folder: Path) -> Tokens:
    ids = [EpisodeId("training", 5, sample) for sample in range(3)]
    turns = dict(zip(ids, (BegunTurn(1, NOTHING), BegunTurn(2, tokens), BegunTurn(3, tokens)), strict=True))
    unfinished.write({5: turns}, folder)
    return unfinished.read(folder, versions_later=0)[5][ids[1]].tokens


def through_the_log(tokens: Tokens, folder: Path) -> Tokens:
    call = RecordedCall(CallPlace(("ask",), 0), What("ask", 5), True, turn=RecordedTurn(tokens, "stop", 1.0, None))
    log = EpisodeLog(folder / "episodes")
    log.begin(REQUEST.id, "a program")
    log.put(REQUEST.id, call)
    log.close()
    turn = EpisodeLog(folder / "episodes").records[REQUEST.id].calls[call.place].turn
    assert turn is not None
    return turn.tokens


def through_an_interruption(tokens: Tokens, _: Path) -> Tokens:
    return continued(REQUEST, GenerationResult(REQUEST.id, tokens, "aborted")).begun


def cut_and_joined(tokens: Tokens, _: Path) -> Tokens:
    return Tokens.joined([NOTHING, *tokens.split([0, 3, 3, len(tokens)])])


BORDERS = [
    through_a_message,
    through_a_request,
    through_the_shelf,
    through_a_checkpoint,
    through_the_log,
    through_an_interruption,
    cut_and_joined,
]


@pytest.mark.parametrize("border", BORDERS)
def test_every_stream_crosses_every_border(border: Callable[[Tokens, Path], Tokens], tmp_path: Path) -> None:
    assert {stream.name for stream in fields(Tokens)} == whole(1).streams().keys() == stream_types().keys()
    assert same_tokens(border(whole(2000), tmp_path), whole(2000))


@pytest.mark.parametrize("stream", [stream.name for stream in fields(Tokens)])
def test_a_change_of_any_stream_on_its_way_is_named(stream: str) -> None:
    result = GenerationResult(REQUEST.id, whole(9), "stop")
    receipts = Receipts()
    receipts.take(REQUEST)
    receipts.write([result])
    check_answer(REQUEST, result)
    result.tokens = replace(result.tokens, **{stream: getattr(whole(9), stream)[::-1].copy()})
    with pytest.raises(ReceiptError, match="of sample 0 of prompt 0 of a differ from those that its engine generated"):
        check_answer(REQUEST, result)


def test_a_stream_that_got_lost_on_its_way_is_noticed() -> None:
    result = GenerationResult(REQUEST.id, whole(9), "stop")
    receipts = Receipts()
    receipts.take(REQUEST)
    receipts.write([result])
    result.tokens = replace(result.tokens, routed_experts=None)
    with pytest.raises(ReceiptError, match="the routed experts of sample 0"):
        check_answer(REQUEST, result)


def test_streams_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="4 token ids; 4 log-probs; 3 versions; 4 mask"):
        Tokens(*(np.zeros(4 - (name == "versions"), dtype) for name, dtype in list(stream_types().items())[:4]))


def test_a_stream_that_only_some_tokens_have_is_refused(tmp_path: Path) -> None:
    some = replace(whole(3), routed_experts=None)
    with pytest.raises(ValueError, match="3 of 5 tokens have no routed experts"):
        Tokens.joined([whole(2), some])
    turns = {named("a"): BegunTurn(0, whole(2)), named("b"): BegunTurn(0, some)}
    with pytest.raises(ValueError, match="1 of 2 samples have no routed experts"):
        unfinished.write({5: turns}, tmp_path)


def test_what_the_model_was_given_has_every_stream_that_its_answers_have() -> None:
    answer = whole(4)
    both = Tokens.joined([answer, Tokens.given([7, 8, 9], 5, like=answer), answer])
    assert both.streams().keys() == answer.streams().keys() == stream_types().keys()
    assert np.array_equal(both.prompt_experts, answer.prompt_experts), "the prompt is the first answer's"
    assert both.ids.tolist()[4:7] == [7, 8, 9]
    assert both.versions.tolist()[4:7] == [5, 5, 5]
    assert both.mask.tolist() == [*answer.mask, False, False, False, *answer.mask]
    assert both.routed_experts is not None
    assert both.routed_experts.shape == (11, 3, 2)
    bare = replace(answer, routed_experts=None)
    assert Tokens.given([7], 5, like=bare).routed_experts is None


def test_what_is_known_of_the_prompt_belongs_to_the_first_tokens(tmp_path: Path) -> None:
    tokens = whole(9)
    assert tokens[:4].prompt_experts is tokens.prompt_experts
    assert tokens[1:4].prompt_experts is None
    later = replace(tokens, versions=np.arange(9, dtype=np.int32))
    assert later.before(4).prompt_experts is later.later(2).prompt_experts is tokens.prompt_experts
    # Prompts differ in length, and of some nothing is known.
    ids = [EpisodeId("training", 5, sample) for sample in range(3)]
    known = [replace(whole(4, n), prompt_experts=whole(1, n).prompt_experts[: 7 - n]) for n in (0, 3)]
    parts = [known[0], replace(whole(2), prompt_experts=None), known[1]]
    unfinished.write({5: {id: BegunTurn(0, part) for id, part in zip(ids, parts, strict=True)}}, tmp_path)
    back = unfinished.read(tmp_path, versions_later=0)[5]
    assert all(same_tokens(back[id].tokens, part) for id, part in zip(ids, parts, strict=True))
    sent = pickle.loads(
        pickle.dumps(Results([GenerationResult(id, p, "stop") for id, p in zip(ids, parts, strict=True)]))
    )
    assert all(same_tokens(result.tokens, part) for result, part in zip(sent, parts, strict=True))


def test_a_mask_that_is_true_throughout_weighs_nothing(tmp_path: Path) -> None:
    """It is there for every token of every response, and nearly always the same."""
    made = Tokens.sampled(*(np.arange(100_000).astype(dtype) for dtype in (np.int32, np.float32, np.int32)))
    assert made.mask.all()
    assert len(pickle.dumps(Results([GenerationResult(named("a"), made, "stop")] * 2))) < 2 * 1_200_000 + 2000
    shelved = Shelf(tmp_path).put(pickle.loads(pickle.dumps(Tokens.joined([made, made]))))
    assert is_constant(shelved.mask)
    assert len(shelved.mask) == 200_000
    assert shelved.mask.all()
    assert not is_constant(Tokens.joined([made, replace(made, mask=np.zeros(100_000, np.bool_))]).mask)


def test_versions_that_are_all_equal_are_one_object_on_the_shelf_and_log_probs_keep_their_bytes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)

    def made(version: int) -> Tokens:
        zeros = np.zeros(1000, np.float32)
        zeros[1::2] = -0.0
        return Tokens.sampled(np.arange(1000, dtype=np.int32), zeros, np.full(1000, version, np.int32))

    one, two, other = (shelf.put(made(version)) for version in (7, 7, 8))
    assert one.versions is two.versions
    assert [set(tokens.versions.tolist()) for tokens in (one, other)] == [{7}, {8}]
    assert one.log_probs.tobytes() == made(7).log_probs.tobytes(), "equal numbers, other bytes"
    mixed = replace(made(7), versions=np.array([7] * 999 + [8], np.int32))
    back_again = replace(made(7), versions=np.array([7, 8] * 499 + [7, 7], np.int32))
    for tokens in (mixed, back_again):
        assert same_tokens(shelf.put(tokens), tokens)


def test_tokens_before_a_version_end_at_the_first_that_is_newer() -> None:
    tokens = replace(whole(6), versions=np.array([1, 1, 2, 3, 3, 3], np.int32))
    assert [len(tokens.before(version)) for version in (1, 2, 3, 4)] == [0, 2, 3, 6]


def test_a_turn_that_follows_equal_tokens_is_checked_like_any_other() -> None:
    """Streams of equal numbers are held as one number, and their bytes do not lie beside one another."""
    zeros, versions = np.zeros(3, np.float32), np.zeros(3, np.int32)
    answer = Tokens.sampled(np.full(3, 5, np.int32), zeros, versions)
    first = REQUEST.id
    again = replace(REQUEST, id=first._replace(turn=1), prompt_ids=(1, 2, 5, 5, 5))
    leaf = Leaf((1, 2), answer, receipt_of(REQUEST, answer)).continued(NOTHING, answer, receipt_of(again, answer))
    assert is_constant(leaf.tokens.ids)
    check_episode(Episode(first, [leaf], "stop"))

"""What is sent by column arrives as it was."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
from small_episodes import named, same_tokens

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import Receipt, receipt_of
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.episodes.tokens import NOTHING, Tokens
from rljob_trainer.rollout.columns import Requests, Results


def test_requests_arrive_as_they_were() -> None:
    sampling, prompt = SamplingSettings(max_tokens=7, stop_token_ids=(2,)), (5, 6, 7)
    requests = Requests(
        [
            GenerationRequest(named("0/0"), prompt, sampling, seed=2**62 + 1),
            GenerationRequest(named("0/1"), prompt, sampling, 3),
        ]
    )
    arrived = pickle.loads(pickle.dumps(requests))
    assert arrived == requests
    begun = Tokens.sampled(np.array([9, 4], np.int32), np.array([-0.5, -1], np.float32), np.array([4, 5], np.int32))
    with_begun = pickle.loads(pickle.dumps(Requests([requests[0], replace(requests[1], begun=begun)])))
    assert [replace(request, begun=NOTHING) for request in with_begun] == requests
    assert len(with_begun[0].begun) == 0
    assert same_tokens(with_begun[1].begun, begun)
    assert arrived[0].prompt_ids is arrived[1].prompt_ids


def test_results_arrive_as_they_were_whatever_their_length() -> None:
    def result(name: str, length: int) -> GenerationResult:
        ids = np.arange(length, dtype=np.int32)
        tokens = Tokens.sampled(ids, -0.25 * ids.astype(np.float32), ids % 2)
        return GenerationResult(named(name), tokens, "stop" if length else "aborted")

    results = Results([result("a", 3), result("none", 0), result("b", 5)])
    arrived = pickle.loads(pickle.dumps(results))
    assert [r.id.purpose for r in arrived] == ["a", "none", "b"]
    assert [r.finish for r in arrived] == ["stop", "aborted", "stop"]
    for got, sent in zip(arrived, results, strict=True):
        assert same_tokens(got.tokens, sent.tokens)


def test_receipts_arrive_as_they_were_also_those_of_other_responses() -> None:
    tokens = Tokens.sampled(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32))
    requests = [GenerationRequest(named(name), (5, 6), SamplingSettings(0.5), seed=n) for n, name in enumerate("abc")]
    own = [receipt_of(request, tokens) for request in requests]
    for receipts in (own, own[::-1], [own[0], None, own[2]], [None] * 3):
        results = Results(
            GenerationResult(request.id, tokens, "stop", receipt=receipt, prefilled=request.seed)
            for request, receipt in zip(requests, receipts, strict=True)
        )
        arrived = pickle.loads(pickle.dumps(results))
        assert [(r.id, r.receipt, r.prefilled) for r in arrived] == [(r.id, r.receipt, r.prefilled) for r in results]
        assert all(type(r.receipt) is Receipt and type(r.receipt.id) is EpisodeId for r in arrived if r.receipt)


def test_empty_lists_travel_too() -> None:
    assert pickle.loads(pickle.dumps(Requests())) == []
    assert pickle.loads(pickle.dumps(Results())) == []

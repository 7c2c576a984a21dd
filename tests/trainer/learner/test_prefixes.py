"""What sequences have in common is computed once, and nothing else changes by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import distances, gradients, plain, scores
from tree_batch import batch_of, tree_batch

from rljob_trainer.episodes.tokens import IntArray
from rljob_trainer.learner import prefixes
from rljob_trainer.learner.attention import Packed, Varlen, packed_attention
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.packing import Row, balance, build_row, plan, ranges
from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.work import cut

CPU = torch.device("cpu")
LOSS = LossSettings(
    policy_loss_params={"clip_low": 0.2, "clip_high": 0.3},
    kl_kind="k3",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
    value_clip=0.3,
    temperature=0.8,
)
WORDS = st.lists(st.integers(0, 1), max_size=7)
"""Of two letters only, so that most begin alike."""
SEQUENCES = st.lists(st.tuples(WORDS.filter(len), WORDS), min_size=1, max_size=9)


@contextmanager
def everything_counts() -> Iterator[None]:
    """A single token that two sequences begin with is computed once, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_FEWEST", 1)
        patch.setattr(prefixes, "_SHARE", 1000)
        yield


def words_of(batch: SequenceBatch) -> list[tuple[int, ...]]:
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    return [tuple(batch.token_ids[a:b].tolist()) for a, b in pairwise(starts.tolist())]


def beginnings(words: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """The nodes of the tree of these words: each is a token with all before it."""
    return {word[: n + 1] for word in words for n in range(len(word))}


def seen_by(row: Row) -> list[np.ndarray]:
    """Which rows each row attends to, in order, as the blocks say it."""
    seen = []
    start = 0
    for block in row.blocks:
        for b, queries in enumerate(block.query_lengths.tolist()):
            keys = np.arange(start, start + queries) if block.key_rows is None else block.key_rows[b]
            count = int(block.key_lengths[b])
            seen += [keys[: count - queries + n + 1] for n in range(queries)]
            start += queries
        assert block.tokens == block.query_lengths.sum()
    assert start == len(row.source)
    return seen


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.booleans(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_row_is_the_tree_of_what_its_sequences_begin_with(
    sequences: list[tuple[list[int], list[int]]], final: bool, multiple: int, chance: Any
) -> None:
    """Of any selection, in any order, of sequences that may be there twice: each node of the tree has one row, which
    attends to the path from the root to it."""
    batch = batch_of([(np.array(p, dtype=np.int32), np.array(r, dtype=np.int32)) for p, r in sequences])
    indices = np.array(chance.choices(range(len(batch)), k=chance.randint(1, len(batch))))
    with everything_counts():
        lengths = Lengths.of(batch)
    row = build_row(lengths, indices, final=final, multiple=multiple)
    words = [words_of(batch)[index] for index in indices]
    held = [
        word if final else word[: max(len(word) - 1, int(batch.prompt_lengths[index]))]
        for word, index in zip(words, indices, strict=True)
    ]
    nodes = beginnings(held)
    assert 0 <= len(row.source) - len(nodes) < multiple
    assert len(row.source) % multiple == 0
    assert lengths.row_tokens(indices) == len(beginnings(words)) >= len(nodes)

    tokens = batch.token_ids[row.source]
    paths = [tuple(tokens[rows].tolist()) for rows in seen_by(row)]
    for rows, at in zip(seen_by(row), range(len(paths)), strict=True):
        assert rows[-1] == at
        np.testing.assert_array_equal(row.positions[rows], np.arange(len(rows)))
    read = set()
    starts = offsets_of(lengths.totals)
    streams = offsets_of(lengths.responses)
    for place, (index, word) in enumerate(zip(indices, words, strict=True)):
        prompt = int(lengths.prompts[index])
        for t, at in enumerate(range(row.offsets[place], row.offsets[place + 1])):
            assert paths[row.output_rows[at]] == word[: prompt + t]
            assert row.targets[at] == starts[index] + prompt + t
            assert row.stream[at] == streams[index] + t
            read.add(int(row.output_rows[at]))
        if final:
            assert row.final_rows is not None
            assert paths[row.final_rows[place]] == word
            read.add(int(row.final_rows[place]))
    assert row.offsets[-1] == len(row.targets) == sum(int(lengths.responses[index]) for index in indices)
    assert read <= set(row.last_rows.tolist())

    # The last layer asks fewer, and sees the same.
    asking, start = [], 0
    for block, last in zip(row.blocks, row.last_blocks, strict=True):
        np.testing.assert_array_equal(last.key_lengths, block.key_lengths)
        assert last.tokens == block.tokens
        for queries, fewer in zip(block.query_lengths.tolist(), last.query_lengths.tolist(), strict=True):
            asking += range(start + queries - fewer, start + queries)
            start += queries
    assert asking == row.last_rows.tolist()


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.integers(1, 4), st.integers(4, 40), st.integers(1, 3))
def test_a_plan_of_trees_is_complete_within_budget_and_in_step(
    sequences: list[tuple[list[int], list[int]]], ranks: int, budget: int, multiple: int
) -> None:
    batch = batch_of([(np.array(p, dtype=np.int32), np.array(r, dtype=np.int32)) for p, r in sequences])
    with everything_counts():
        lengths = Lengths.of(batch)
    planned = plan(lengths, ranks, budget, count_multiple=multiple)
    assert sorted(np.concatenate([m for micros in planned for m in micros]).tolist()) == list(range(len(batch)))
    assert len({len(micros) for micros in planned}) == 1
    assert len(planned[0]) % multiple == 0
    for micro in (m for micros in planned for m in micros):
        assert len(micro) < 2 or len(build_row(lengths, micro).source) <= max(budget, int(lengths.totals.max()))


def test_a_long_tree_is_cut_where_its_branches_are() -> None:
    """Four branches of 100 tokens behind 100 that all have in common, each with four twigs of 50: four ranks get a
    branch each."""
    common = np.tile(np.array([0, 350, 350, 350]), 4)
    common[[4, 8, 12]] = 100
    common[[n for n in range(16) if n % 4]] = 200
    lengths = Lengths(np.full(16, 100), np.full(16, 150), np.arange(16), common)
    assert lengths.row_tokens(np.arange(16)) == 100 + 4 * (100 + 4 * 50)
    shares = balance(lengths, np.arange(16), 4)
    assert sorted(sorted(share.tolist()) for share in shares) == [list(range(n, n + 4)) for n in range(0, 16, 4)]
    assert [lengths.row_tokens(share) for share in shares] == [400] * 4
    micros = [micro for micros in plan(lengths, 1, 450) for micro in micros]
    assert all(lengths.row_tokens(micro) <= 450 for micro in micros)
    assert sum(lengths.row_tokens(micro) for micro in micros) <= 1.05 * (100 + 4 * 300 + 100 * len(micros))


def test_what_is_worth_computing_once() -> None:
    rng = np.random.default_rng(0)

    def text(length: int) -> IntArray:
        return rng.integers(0, 1000, length).astype(np.int32)

    def joined(*parts: IntArray) -> IntArray:
        return np.concatenate(parts)

    def common(*sequences: tuple[IntArray, IntArray]) -> list[int]:
        return sorted(Lengths.of(batch_of(list(sequences))).common.tolist())

    short, prompt, turn = text(3), text(40), text(60)
    # A whole prompt, however short; and of what follows it sixteen tokens or more.
    assert common((short, text(9)), (short, text(9))) == [0, 3]
    assert common((prompt, joined(turn[:15], text(9))), (prompt, joined(turn[:15], text(9)))) == [0, 40]
    assert common((prompt, joined(turn[:16], text(9))), (prompt, joined(turn[:16], text(9)))) == [0, 56]
    # Of prompts that differ what is an eighth of the shorter sequence.
    assert common((joined(prompt[:20], text(80)), text(60)), (joined(prompt[:20], text(90)), text(60))) == [0, 20]
    assert common((joined(prompt[:20], text(81)), text(60)), (joined(prompt[:20], text(90)), text(60))) == [0, 0]
    # A history that was edited: the later leaf's prompt ends inside the earlier one's response.
    assert common((prompt, joined(turn, text(20))), (joined(prompt, turn[:30], text(7)), text(5))) == [0, 70]
    assert Lengths.apart(np.array([3, 3]), np.array([1, 1])).row_tokens(np.arange(2)) == 8


def test_a_sequence_whose_last_token_is_left_out_parts_no_others() -> None:
    """A prompt, the same tokens as a prompt with a response, whose last one predicts nothing, and one that goes on."""
    text = np.arange(30, dtype=np.int32)
    for order in permutations([(text, text[:0]), (text[:5], text[5:]), (text[:5], np.append(text[5:], 7))]):
        row = build_row(Lengths.of(batch_of(list(order))), np.arange(3))
        assert sorted(row.positions.tolist()) == list(range(30))


def test_siblings_keep_their_prompt_whoever_stands_between_them() -> None:
    """Leaves with edited histories have longer prompts, which begin with the siblings' own; here that is less than an
    eighth of each, and sixteen tokens beyond it are nowhere in common."""
    sequences = []
    for number, first in enumerate((1, 9, 2, 8)):
        own = np.full(900, first, dtype=np.int32)
        sequences.append((np.zeros(50, dtype=np.int32), own))
        history = np.concatenate([np.zeros(50, dtype=np.int32), np.full(300, 3 + number, dtype=np.int32)])
        sequences.append((history, np.full(600, 4, dtype=np.int32)))
    lengths = Lengths.of(batch_of(sequences))
    assert sorted(lengths.common.tolist()) == [0, *[50] * 7]
    assert lengths.row_tokens(np.arange(8)) == 50 + 8 * 900
    assert lengths.answers(np.arange(8)) == 4 * 900 + 4 * 600


def test_a_response_longer_than_a_row_leaves_its_siblings_together() -> None:
    lengths = Lengths.of_groups(np.full(16, 2000), np.array([9000, *[100] * 15]), np.zeros(16, dtype=np.int64))
    micros = [micro for micros in plan(lengths, 1, 10_000) for micro in micros]
    assert sorted(lengths.row_tokens(micro) for micro in micros) == [3500, 11000]


def test_a_row_has_copies_of_keys_for_three_times_its_tokens_at_most() -> None:
    """Siblings with 16,000 tokens in common and 200 of their own: by tokens 80 of them would fit into a row, and its
    keys would be 1.3 million."""
    siblings, prompt, shared, own, budget = 64, 500, 16_000, 200, 32_768
    common = np.full(siblings, prompt + shared)
    common[0] = 0
    responses = np.full(siblings, shared + own)
    lengths = Lengths(np.full(siblings, prompt), responses, np.arange(siblings), common)
    micros = [micro for micros in plan(lengths, 1, budget) for micro in micros]
    for micro in micros:
        row = build_row(lengths, micro)
        assert len(row.source) <= budget
        keys = sum(int(block.key_lengths.sum()) for block in row.blocks)
        assert keys <= 3 * budget + len(micro) * prompt
    # Six of them have the copies of 97,200 tokens beyond their prompt.
    assert len(micros) <= 12


def test_tokens_that_went_to_different_experts_are_computed_apart() -> None:
    rng = np.random.default_rng(0)
    prompt, turn = rng.integers(0, 50, 20).astype(np.int32), rng.integers(0, 50, 40).astype(np.int32)
    batch = batch_of([(prompt, turn), (prompt, np.append(turn, 1).astype(np.int32))])
    experts = np.zeros((121, 2, 2), np.uint8)
    experts[..., 1] = 1
    assert Lengths.of(replace(batch, routed_experts=experts)).common.tolist() == [0, 60]
    other = experts.copy()
    other[60 + 20 + 30, 1] = [1, 0]  # the second one's thirty-first response token
    assert Lengths.of(replace(batch, routed_experts=other)).common.tolist() == [0, 50]
    # A leaf whose prompt has the first one's answer in it: those were response tokens once.
    leaf = batch_of([(prompt, turn), (np.concatenate([prompt, turn[:30]]), turn[:20])])
    chosen = np.zeros((130, 2, 2), np.uint8)
    chosen[..., 1] = 1
    assert Lengths.of(replace(leaf, routed_experts=chosen)).common.tolist() == [0, 50]
    chosen[60 + 20 + 17, 0] = [1, 0]
    assert Lengths.of(replace(leaf, routed_experts=chosen)).common.tolist() == [0, 37]
    other[60] = 7  # its first prompt token: an engine that has the prompt already chose its experts once
    assert Lengths.of(replace(batch, routed_experts=other)).common.tolist() == [0, 50]


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("final", [False, True])
def test_attention_and_its_gradient_are_those_of_each_path(final: bool, window: int | None) -> None:
    """In float64, beside scores of all rows with all others of which those off the path are left out."""
    torch.manual_seed(0)
    batch = tree_batch()
    lengths = Lengths.of(batch)
    row = build_row(lengths, np.arange(len(batch)), final=final)
    tokens, dim, scale = len(row.source), 8, 0.3
    q, k, v = (torch.randn(1, heads, tokens, dim, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    packed = Packed.of(row, CPU, torch.float64, outputs_only=True)
    assert packed.last is not None
    on_path = torch.zeros(tokens, tokens, dtype=torch.bool)
    for at, rows in enumerate(seen_by(row)):
        on_path[at, torch.from_numpy(rows if window is None else rows[-window:])] = True
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *repeated, attn_mask=on_path, scale=scale)
    expected = expected.transpose(1, 2)
    pull = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * pull).sum(), (q, k, v), retain_graph=True)
    module = torch.nn.Identity()
    out, _ = packed_attention(module, q, k, v, None, scaling=scale, sliding_window=window, packed=packed)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad((out * pull).sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)

    read = torch.zeros(tokens, dtype=torch.bool)
    read[torch.from_numpy(row.last_rows)] = True
    assert read.sum() < tokens
    out, _ = packed_attention(module, q, k, v, None, scaling=scale, sliding_window=window, packed=packed.last)
    torch.testing.assert_close(out, torch.where(read[:, None, None], expected, 0), rtol=0, atol=1e-12)
    masked = pull * read[:, None, None]
    wanted = torch.autograd.grad((expected * masked).sum(), (q, k, v))
    for ours, theirs in zip(torch.autograd.grad((out * pull).sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_the_flash_kernel_is_told_the_same_paths() -> None:
    row = build_row(Lengths.of(tree_batch()), np.arange(3 * 9))
    for blocks in (row.blocks, row.last_blocks):
        varlen = Varlen.of(blocks, len(row.source))
        assert varlen.gather is not None
        queries, keys = np.diff(varlen.cu_queries), np.diff(varlen.cu_keys)
        ends = varlen.cu_keys.tolist()
        seen = seen_by(row)
        asked = ranges(0, np.array([len(row.source)])) if blocks is row.blocks else row.last_rows
        at = 0
        for segment, (asking, count) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
            rows = varlen.gather.index[ends[segment] : ends[segment + 1]].numpy()
            for n in range(asking):  # causal there: the last query sees the last key
                np.testing.assert_array_equal(rows[: count - asking + n + 1], seen[asked[at]])
                at += 1
        assert at == len(asked)


@pytest.fixture(scope="module")
def alone(ranks: Any, tied_folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of one process that computes each sequence by itself."""
    found: dict[str, torch.Tensor] = ranks.run(
        1, gradients, plain(tied_folder, share_prefixes=False), tree_batch(), LOSS
    )[0]
    return found


@pytest.mark.slow(
    stands_for=["[{}-1e-06]", "[{'micro_batch_tokens': 150}-1e-05]", "[{'ranks': 2, 'context': 2}-1e-05]"]
)
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 1e-6),
        ({"micro_batch_tokens": 150}, 1e-5),
        ({"log_prob_chunk_tokens": 7}, 1e-5),
        ({"ranks": 2, "micro_batch_tokens": 200}, 1e-5),
        ({"ranks": 2, "context": 2}, 1e-5),
        ({"ranks": 4, "context": 4, "micro_batch_tokens": 200}, 1e-5),
        ({"ranks": 4, "context": 2, "micro_batch_tokens": 300}, 1e-5),
    ],
    ids=str,
)
def test_gradients_are_those_of_each_sequence_by_itself(
    changes: dict[str, Any], bound: float, ranks: Any, tied_folder: Path, alone: dict[str, torch.Tensor]
) -> None:
    layout = plain(tied_folder, **changes)
    for other in ranks.run(layout.ranks, gradients, layout, tree_batch(), LOSS):
        for name, distance in distances(other, alone):
            assert distance < bound, name


@pytest.mark.slow(stands_for=["[{}]", "[{'ranks': 2, 'tensor': 2}]"])
@pytest.mark.parametrize("layout", [{}, {"ranks": 4, "context": 2}, {"ranks": 2, "tensor": 2}], ids=str)
def test_every_stream_is_that_of_each_sequence_by_itself(layout: dict[str, Any], ranks: Any, tied_folder: Path) -> None:
    batch = tree_batch()
    wanted = ScoreRequest(
        0.8,
        log_probs=True,
        entropy=True,
        sum_squared_probs=True,
        vocabulary_kl=True,
        reference=True,
        values=True,
    )
    merged = []
    for changes in ({"share_prefixes": False}, {"micro_batch_tokens": 250, **layout}):
        settings = plain(tied_folder, **changes)
        told = ranks.run(settings.ranks, scores, settings, batch, wanted)
        backend = Fsdp2()
        work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
        merged.append(
            {
                name: work.merge(
                    batch, [rank.streams[name] for rank in work.returned(told)], per_sequence=name == "final_values"
                )
                for name in told[0].streams
            }
        )
    expected, ours = merged
    assert expected.keys() == ours.keys() >= {"log_probs", "entropy", "values", "vocabulary_kl"}
    for name, stream in expected.items():
        np.testing.assert_allclose(ours[name], stream, atol=3e-6, err_msg=name)


def test_response_tokens_that_sequences_have_in_common_have_one_distribution(
    tied_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed of the different ones only, and an entropy that nothing is learned from has no gradient, for
    which the softmax would be computed once more."""
    from rljob_trainer.learner import models

    counted, of_entropy = [], []

    def head(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.append(len(hidden))
        log_probs, entropy = real(hidden, *args, **kwargs)
        entropy.register_hook(of_entropy.append)
        return log_probs, entropy

    real: Callable[..., Any] = models.log_probs_and_entropy
    monkeypatch.setattr(models, "log_probs_and_entropy", head)
    batch = tree_batch()
    policy = models.load_policy(tied_folder, dtype=torch.float32)
    row = build_row(Lengths.of(batch), np.arange(len(batch)))
    packed = models.PackedRow.of(row, batch.token_ids, CPU, torch.float32)
    streams = policy(packed, 1.0)
    words = words_of(batch)
    answers = {
        word[: n + 1] for word, p in zip(words, batch.prompt_lengths.tolist(), strict=True) for n in range(p, len(word))
    }
    assert counted[0] <= 1.05 * len(answers)
    assert len(streams.log_probs) == len(streams.entropy) == batch.response_lengths.sum() > 1.5 * len(answers)
    (streams.log_probs + streams.entropy.detach()).sum().backward(retain_graph=True)
    streams.entropy.sum().backward()
    assert [gradient is not None for gradient in of_entropy] == [False, True]

"""Plans and rows as properties: nothing lost, nothing twice, budgets kept, ranks in step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cut_for import cut_for
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljob_trainer.learner.packing import balance, build_row, check_batch, plan, ranges, take
from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import SequenceBatch

GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=9
)
"""A prompt's length and the lengths of its responses, for each group."""


def lengths_of(groups: list[tuple[int, list[int]]]) -> Lengths:
    return Lengths.of_groups(
        np.array([p for p, rs in groups for _ in rs]),
        np.array([r for _, rs in groups for r in rs]),
        np.array([i for i, (_, rs) in enumerate(groups) for _ in rs]),
    )


def test_ranges() -> None:
    np.testing.assert_array_equal(ranges([5, 0, 7], np.array([2, 0, 3])), [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(ranges(0, np.array([1, 3])), [0, 0, 1, 2])
    assert len(ranges([], np.empty(0, dtype=np.int64))) == 0


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 4), st.integers(4, 60), st.integers(1, 4))
def test_a_plan_is_complete_within_budget_and_in_step(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int, multiple: int
) -> None:
    lengths = lengths_of(groups)
    planned = plan(lengths, ranks, budget, count_multiple=multiple)
    assert len(planned) == ranks
    assert len({len(micros) for micros in planned}) == 1
    assert len(planned[0]) % multiple == 0
    assert sorted(np.concatenate([m for micros in planned for m in micros]).tolist()) == list(range(len(lengths)))
    # A sequence is never cut: one that is longer than the budget makes room for itself.
    longest = int((lengths.prompts + lengths.responses).max())
    for micro in (m for micros in planned for m in micros):
        assert len(micro) < 2 or len(build_row(lengths, micro).source) <= max(budget, longest)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.booleans())
def test_a_row_holds_every_token_once_and_each_prompt_once(groups: list[tuple[int, list[int]]], final: bool) -> None:
    lengths = lengths_of(groups)
    indices = np.random.default_rng(1).permutation(len(lengths))
    row = build_row(lengths, indices, final=final)
    starts, group = offsets_of(lengths.totals), [number for number, (_, rs) in enumerate(groups) for _ in rs]
    expected = sum(p + sum(max(0, r if final else r - 1) for r in rs) for p, rs in groups)
    assert len(row.source) == len(row.positions) == expected == sum(int(b.query_lengths.sum()) for b in row.blocks)
    np.testing.assert_array_equal(row.offsets, offsets_of(lengths.responses[indices]))

    sequence = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # of each token of the batch
    position = np.arange(starts[-1]) - starts[sequence]
    token = 0
    for at, index in enumerate(indices.tolist()):
        p, r = int(lengths.prompts[index]), int(lengths.responses[index])
        for t in range(r):
            seen, output = int(row.targets[token]), int(row.output_rows[token])
            assert (sequence[seen], position[seen]) == (index, p + t)
            source = int(row.source[output])
            assert row.positions[output] == position[source] == p + t - 1
            # The first token is predicted by the prompt, which may be a sibling's; the others by their own past.
            assert group[sequence[source]] == group[index]
            assert t == 0 or sequence[source] == index
            assert row.stream[token] == offsets_of(lengths.responses)[index] + t
            token += 1
        if final:
            assert row.final_rows is not None
            source = int(row.source[row.final_rows[at]])
            assert row.positions[row.final_rows[at]] == position[source] == p + r - 1
    assert token == len(row.targets)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_attention_blocks_see_the_prompt_and_their_own_past(groups: list[tuple[int, list[int]]]) -> None:
    lengths = lengths_of(groups)
    row = build_row(lengths, np.arange(len(lengths)), final=True)
    start = 0
    for block in row.blocks:
        for b, count in enumerate(block.query_lengths.tolist()):
            own = np.arange(start, start + count)
            keys = own if block.key_rows is None else block.key_rows[b, : int(block.key_lengths[b])]
            np.testing.assert_array_equal(row.positions[keys], np.arange(len(keys)))
            np.testing.assert_array_equal(keys[len(keys) - count :], own)
            start += count


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.booleans())
def test_the_last_layer_needs_the_rows_that_are_read(groups: list[tuple[int, list[int]]], final: bool) -> None:
    lengths = lengths_of(groups)
    row = build_row(lengths, np.arange(len(lengths)), final=final)
    read = {*row.output_rows.tolist(), *(row.final_rows.tolist() if row.final_rows is not None else ())}
    rows = row.last_rows.tolist()
    assert rows == sorted(set(rows))
    assert read <= set(rows)
    # A prompt without any response keeps its last row all the same.
    assert len(rows) == len(read) + (0 if final else sum(not any(rs) for _, rs in groups))
    start, asked = 0, []
    for block, last in zip(row.blocks, row.last_blocks, strict=True):
        np.testing.assert_array_equal(block.key_lengths, last.key_lengths)
        for count, fewer in zip(block.query_lengths.tolist(), last.query_lengths.tolist(), strict=True):
            asked += range(start + count - fewer, start + count)
            start += count
    assert asked == rows


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.booleans(), st.integers(1, 9))
@example([(1, [0])], False, 9)
def test_what_fills_a_row_up_is_read_by_nobody(groups: list[tuple[int, list[int]]], final: bool, multiple: int) -> None:
    lengths = lengths_of(groups)
    indices = np.arange(len(lengths))
    plain, row = build_row(lengths, indices, final=final), build_row(lengths, indices, final=final, multiple=multiple)
    assert len(row.source) % multiple == 0
    assert 0 <= len(row.source) - len(plain.source) < multiple
    assert row.source.max() < int((lengths.prompts + lengths.responses).sum())  # of a batch that may be shorter
    assert sum(int(block.query_lengths.sum()) for block in row.blocks) == len(row.source)
    assert sum(int(block.query_lengths.sum()) for block in row.last_blocks) == len(row.last_rows)
    # The rows that are read stand elsewhere, but hold the same tokens at the same positions.
    read, read_plain = [row.output_rows], [plain.output_rows]
    if final:
        assert row.final_rows is not None
        assert plain.final_rows is not None
        read, read_plain = [*read, row.final_rows], [*read_plain, plain.final_rows]
    ours, theirs = np.concatenate(read), np.concatenate(read_plain)
    np.testing.assert_array_equal(row.source[ours], plain.source[theirs])
    np.testing.assert_array_equal(row.positions[ours], plain.positions[theirs])
    assert set(ours.tolist()) <= set(row.last_rows.tolist())
    np.testing.assert_array_equal(row.targets, plain.targets)
    np.testing.assert_array_equal(row.stream, plain.stream)
    # Whatever fills the row up attends to itself alone, and no other's keys are among it.
    keys = [b.key_rows[np.arange(b.key_rows.shape[1]) < b.key_lengths[:, None]] for b in row.blocks
            if b.key_rows is not None]  # fmt: skip
    plain_keys = [b.key_rows[np.arange(b.key_rows.shape[1]) < b.key_lengths[:, None]] for b in plain.blocks
                  if b.key_rows is not None]  # fmt: skip
    for rows, others in zip(keys, plain_keys, strict=True):
        np.testing.assert_array_equal(row.source[rows], plain.source[others])
    empty = build_row(lengths, indices[:0], final=final, multiple=multiple)
    assert (len(empty.source), len(empty.output_rows)) == (multiple, 0)


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    rng = np.random.default_rng(0)
    count = 256
    lengths = Lengths.of_groups(
        np.repeat(rng.integers(10, 100, count // 8), 8),
        rng.integers(1, 400, count),
        np.repeat(np.arange(count // 8), 8),
    )
    for ranks in (2, 4, 8):
        loads = [lengths.row_tokens(part) for part in balance(lengths, np.arange(count), ranks)]
        assert max(loads) <= 1.1 * sum(loads) / ranks
    one_prompt = Lengths.of_groups(np.full(8, 10), np.full(8, 100), np.zeros(8, dtype=np.int64))
    assert [len(part) for part in balance(one_prompt, np.arange(8), 4)] == [2, 2, 2, 2]


def test_take_and_merge_are_inverse(make_batch: Callable[..., SequenceBatch]) -> None:
    batch = make_batch()
    order = np.random.default_rng(2).permutation(len(batch))
    part = take(batch, order)
    check_batch(part)
    offsets = offsets_of(batch.response_lengths)
    np.testing.assert_array_equal(
        part.advantages, np.concatenate([batch.advantages[offsets[i] : offsets[i + 1]] for i in order])
    )
    work = cut_for(batch, [range(len(batch))], ranks=3, token_budget=50)
    streams, finals = [], []
    for share in work.shares:
        done = [m for mini in share.micro_batches for m in mini]
        streams.append(np.concatenate([share.batch.advantages[build_row(share.lengths, m).stream] for m in done]))
        finals.append(np.concatenate([share.batch.prompt_lengths[m] for m in done]))
    np.testing.assert_array_equal(work.merge(batch, streams), batch.advantages)
    np.testing.assert_array_equal(work.merge(batch, finals, per_sequence=True), batch.prompt_lengths)


def test_counts_are_those_of_all_ranks(make_batch: Callable[..., SequenceBatch]) -> None:
    batch = make_batch()
    work = cut_for(batch, [[0, 1, 2], [5]], ranks=2, token_budget=50)
    offsets = offsets_of(batch.response_lengths)
    masks = [batch.mask[offsets[i] : offsets[i + 1]] for i in range(len(batch))]
    for mini, counts in zip(([0, 1, 2], [5]), work.shares[1].counts, strict=True):
        assert counts.tokens == sum(masks[i].sum() for i in mini)
        assert counts.sequences == sum(masks[i].any() for i in mini)


def test_malformed_batches_are_refused(make_batch: Callable[..., SequenceBatch]) -> None:
    batch = make_batch()
    batch = replace(batch, advantages=batch.advantages[:-1])
    with pytest.raises(ValueError, match=r"advantages has \d+ entries but there are"):
        cut_for(batch, [[0]], ranks=1, token_budget=100)
    batch = make_batch()
    with pytest.raises(ValueError, match="mini-batch 1 names sequences outside"):
        cut_for(batch, [[0], [99]], ranks=1, token_budget=100)
    batch = replace(batch, prompt_lengths=np.where(np.arange(len(batch)) == 3, 0, batch.prompt_lengths))
    with pytest.raises(ValueError, match="sequence 3 has no prompt"):
        cut_for(batch, [[0]], ranks=1, token_budget=100)

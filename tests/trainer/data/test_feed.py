"""The order of prompts: every row once an epoch, a new order each epoch, and a resume that goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.data.columns import Row
from rljob_trainer.data.feed import BLOCK, PromptFeed, Source, validation_prompts
from rljob_trainer.data.kept import KeptPrompts
from rljob_trainer.data.order import permutation
from rljob_trainer.data.tokenisation import PromptEncoder, PromptSettings
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.errors import CheckpointError, DataError, IntegrityError, JobFileError
from rljob_trainer.models.tokenizer import character_tokenizer


class Listed:
    """Rows from a list of texts; counts how often a row is read."""

    columns = ("question",)

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.reads = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Row:
        self.reads += 1
        return {"question": self.texts[index]}

    def place(self, index: int) -> str:
        return f"row {index}"

    def first_without(self, name: str) -> int | None:
        return None

    def first_null(self, name: str) -> int | None:
        return None


TOKENIZER = character_tokenizer("0123456789", 64)


def source(name: str, texts: Sequence[str], max_tokens: int = 64) -> Source:
    return Source(name, Listed(texts), PromptEncoder(TOKENIZER, PromptSettings("question", max_tokens=max_tokens)))


def feed(count: int = 10, *, seed: int = 1, max_tokens: int = 64, **settings: Any) -> PromptFeed:
    return PromptFeed([source("s", [str(i) for i in range(count)], max_tokens)], seed=seed, **settings)


def take(some_feed: PromptFeed, count: int) -> list[Prompt]:
    prompts = [some_feed.next() for _ in range(count)]
    assert all(prompt is not None for prompt in prompts)
    return prompts  # type: ignore[return-value]


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    prompts = take(feed(200), 600)
    assert [p.ordinal for p in prompts] == list(range(600))
    assert [p.epoch for p in prompts] == [0] * 200 + [1] * 200 + [2] * 200
    orders = [[p.row for p in prompts[i : i + 200]] for i in (0, 200, 400)]
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert all(p.text == str(p.row) for p in prompts)


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    rows = [[p.row for p in take(feed(50, seed=s), 100)] for s in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    assert [p.row for p in take(feed(5, shuffle=False), 7)] == [0, 1, 2, 3, 4, 0, 1]


def test_the_permutation_is_fair() -> None:
    """Each of the 6 orders of three rows: chi-squared with 5 degrees of freedom, 99.9 % below 20.5."""
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(3000):
        order = tuple(permutation(3, 7, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


def test_the_permutation_is_made_from_the_raw_bits_that_numpy_guarantees() -> None:
    bits = np.random.PCG64(np.random.SeedSequence((3, 1))).random_raw(8).tolist()
    assert permutation(8, 3, 1).tolist() == sorted(range(8), key=bits.__getitem__)


@pytest.mark.parametrize("max_tokens", [64, 2])
def test_resuming_at_any_position_goes_on_as_if_never_stopped(max_tokens: int) -> None:
    """With a limit of 2 tokens (one digit after the begin token) rows 10 to 14 are dropped on the way."""
    uninterrupted = feed(15, max_tokens=max_tokens)
    whole = take(uninterrupted, 40)
    for position in range(38):
        first = feed(15, max_tokens=max_tokens)
        take(first, position)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = feed(15, max_tokens=max_tokens)
        resumed.load_state_dict(state)
        assert resumed.ordinal == position
        assert take(resumed, 40 - position) == whole[position:]
        assert resumed.dropped == uninterrupted.dropped


@given(st.integers(1, 150), st.integers(0, 400), st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_resume_property(count: int, position: int, seed: int) -> None:
    first = feed(count, seed=seed)
    take(first, position)
    resumed = feed(count, seed=seed)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 20) == take(first, 20)


def test_loading_a_state_works_on_a_feed_that_has_moved() -> None:
    moved = feed(10)
    start = moved.state_dict()
    first = take(moved, 25)
    moved.load_state_dict(start)
    assert take(moved, 25) == first


def test_the_last_epoch_ends_the_feed() -> None:
    limited = feed(4, epochs=2)
    assert len(take(limited, 8)) == 8
    assert limited.next() is None
    assert limited.next() is None
    resumed = feed(4, epochs=2)
    resumed.load_state_dict(limited.state_dict())
    assert resumed.next() is None


def test_several_sources_are_mixed_in_proportion_and_keep_their_names() -> None:
    mixed = PromptFeed([source("a", [str(i) for i in range(30)]), source("b", [str(i) for i in range(10)])], seed=1)
    prompts = take(mixed, 40)
    assert sorted((p.source, p.row) for p in prompts) == [("a", i) for i in range(30)] + [("b", i) for i in range(10)]
    assert {p.source for p in prompts[:20]} == {"a", "b"}
    with pytest.raises(DataError, match="same name"):
        PromptFeed([source("a", ["1"]), source("a", ["2"])], seed=1)


def test_a_feed_reads_only_a_block_ahead() -> None:
    rows = Listed(["1"] * 100_000)
    big = PromptFeed([Source("s", rows, PromptEncoder(TOKENIZER, PromptSettings("question")))], seed=1)
    assert rows.reads == 0
    take(big, 1)
    assert rows.reads < 200


def test_each_row_is_read_once_and_later_epochs_are_as_if_it_were_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, short = Listed([str(i) for i in range(150)]), Listed(["7"])
    encoder = PromptEncoder(TOKENIZER, PromptSettings("question", max_tokens=2))
    sources = [Source("a", rows, encoder), Source("b", short, encoder)]
    prompts = take(PromptFeed(sources, seed=3), 250)  # an epoch has 101 that are short enough
    assert (rows.reads, short.reads) == (150, 1)
    monkeypatch.setattr(KeptPrompts, "keep", lambda *_: None)
    assert take(PromptFeed(sources, seed=3), 250) == prompts
    assert rows.reads >= 150 + 2 * 150


def begun(sources: Sequence[Source]) -> PromptFeed:
    """A feed that has read all that it reads before it is asked."""
    some = PromptFeed(sources, seed=3)
    some.begin()
    for _ in range(100):  # each block has the next one read
        some._ahead._reader.submit(int).result()
    return some


def test_the_first_epoch_can_be_read_before_its_first_prompt_is_asked_for() -> None:
    rows, short = Listed([str(i) for i in range(150)]), Listed(["7"])
    encoder = PromptEncoder(TOKENIZER, PromptSettings("question", max_tokens=2))
    sources = [Source("a", rows, encoder), Source("b", short, encoder)]
    early = begun(sources)
    assert (rows.reads, short.reads) == (150, 1)
    assert early.state_dict() == PromptFeed(sources, seed=3).state_dict()
    read = rows.reads, short.reads  # with the rows by which a source is recognised
    prompts = take(early, 250)
    assert (rows.reads, short.reads) == read
    assert early.dropped > 0
    assert take(PromptFeed(sources, seed=3), 250) == prompts


def test_no_more_is_read_early_than_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Listed(["1"] * 10_000)
    monkeypatch.setattr("rljob_trainer.data.feed.KeptPrompts", lambda: KeptPrompts(most_bytes=100_000))
    big = begun([Source("s", rows, PromptEncoder(TOKENIZER, PromptSettings("question")))])
    assert 100 < rows.reads < 1000
    before = rows.reads
    take(big, 100)
    assert rows.reads <= before + 3 * BLOCK


def test_a_bad_row_that_was_read_early_is_an_error_when_it_is_its_turn() -> None:
    rows = Listed([*(str(i) for i in range(200)), "not a digit"])
    broken = begun([Source("s", rows, PromptEncoder(TOKENIZER, PromptSettings("question")))])
    with pytest.raises(DataError, match="row 200: the tokenizer does not know every character"):
        take(broken, 201)


def test_a_run_goes_on_after_the_row_that_ended_it_was_corrected_as_its_error_says() -> None:
    texts = [*(str(i) for i in range(200)), "not a digit"]
    first = PromptFeed([source("s", texts)], seed=3, shuffle=False)
    take(first, 192)  # the blocks before the one that the row is in
    state = first.state_dict()
    with pytest.raises(DataError, match=r"row 200: the tokenizer .*\. Correct the row in place .* Do not remove it"):
        first.next()
    corrected = PromptFeed([source("s", [*texts[:-1], "7"])], seed=3, shuffle=False)
    corrected.load_state_dict(state)
    assert take(corrected, 9)[-1].text == "7"
    with pytest.raises(CheckpointError, match="belongs to sources"):
        PromptFeed([source("s", texts[:-1])], seed=3, shuffle=False).load_state_dict(state)


def test_counts_of_dropped_and_cut_prompts() -> None:
    dropping = feed(15, max_tokens=2)
    assert {p.row for p in take(dropping, 10)} == set(range(10))
    take(dropping, 10)
    assert dropping.dropped in range(5, 11)
    encoder = PromptEncoder(TOKENIZER, PromptSettings("question", max_tokens=2, overlong="truncate"))
    cutting = PromptFeed([Source("s", Listed(["1", "23"]), encoder)], seed=1)
    take(cutting, 4)
    assert (cutting.dropped, cutting.truncated) == (0, 2)


def test_data_without_a_usable_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="has no rows"):
        feed(0)
    with pytest.raises(DataError, match=r"all 3 prompts are longer than maxPromptTokens = 1"):
        feed(3, max_tokens=1).next()
    encoder = PromptEncoder(TOKENIZER, PromptSettings("{hint}"))
    with pytest.raises(JobFileError, match=r"data source 's' has no column 'hint'"):
        PromptFeed([Source("s", Listed(["1"]), encoder)], seed=1)


@pytest.mark.parametrize("other", [feed(11), feed(10, seed=2), feed(10, shuffle=False)])
def test_a_state_of_other_data_is_refused(other: PromptFeed) -> None:
    with pytest.raises(CheckpointError, match="use the same data to resume"):
        feed(10).load_state_dict(other.state_dict())


def test_validation_prompts_are_the_first_rows_in_order() -> None:
    held_out = source("v", [str(i) for i in range(8, 200)], max_tokens=3)
    prompts = validation_prompts(held_out, limit=100)
    assert [(p.text, p.row, p.ordinal) for p in prompts] == [(str(i + 8), i, i) for i in range(92)]
    assert [p.source for p in prompts] == ["v"] * 92
    with pytest.raises(DataError, match=r"has no prompt within maxPromptTokens = 1 \(3 rows\)"):
        validation_prompts(source("v", ["1", "2", "3"], max_tokens=1))


def test_a_prompt_can_be_made_again_from_its_place() -> None:
    mixed = PromptFeed([source("a", ["1", "2", "345"], 3), source("b", ["6"], 3)], seed=1)
    assert mixed.source_names == ("a", "b")
    for prompt in take(mixed, 6):
        again = mixed.prompt_at(ordinal=prompt.ordinal, epoch=prompt.epoch, source=prompt.source, row=prompt.row)
        assert again == prompt
    for name, row in (("c", 0), ("b", 1), ("a", 2)):  # no such source, no such row, a row that is dropped
        with pytest.raises(CheckpointError, match=f"row {row} of data source '{name}', the source of prompt 9"):
            mixed.prompt_at(ordinal=9, epoch=0, source=name, row=row)


def test_progress_counts_passes_over_the_data() -> None:
    some = feed(10)
    assert some.progress == 0.0
    take(some, 25)
    assert some.progress == 2.5


def resumed(changed: Sequence[str]) -> PromptFeed:
    """A feed over ``changed`` rows that goes on from the state of one over 0, 1, 2 ..., 31."""
    before = PromptFeed([source("s", [str(i) for i in range(32)])], seed=1)
    take(before, 3)
    after = PromptFeed([source("s", changed)], seed=1)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return after


def test_the_same_rows_are_recognised() -> None:
    assert take(resumed([str(i) for i in range(32)]), 1)[0].ordinal == 3


def test_a_row_that_changed_is_named_at_a_resume() -> None:
    changed = [str(i) if i != 5 else "6" for i in range(32)]
    with pytest.raises(
        CheckpointError, match=r"the prompt in row 5 of data source 's' has changed since.*\(1 of 32 checked rows"
    ):
        resumed(changed)


def test_a_template_that_drifts_is_told_from_a_row_that_changed() -> None:
    with pytest.raises(CheckpointError, match=r"'s' are tokenized differently .*\(32 of 32 .*: the chat template"):
        resumed([f"{i}0" for i in range(32)])


def test_prompts_that_are_skipped_or_come_twice_are_counted() -> None:
    for by, words in ((1, "1 prompts were skipped"), (-1, "1 prompts were handed out twice")):
        some = feed(10)
        take(some, 3)
        some._position += by
        with pytest.raises(IntegrityError, match=words):
            some.next()

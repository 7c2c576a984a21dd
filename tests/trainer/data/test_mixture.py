"""A mixture of sources: by weights, each with its own columns, told apart by a column; and it resumes exactly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec.data import Data
from rljob_trainer.data import training_feed, validation_sets
from rljob_trainer.data.feed import MOST_COUNTED, OTHER, PromptFeed, shares
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.errors import CheckpointError, DataError, JobFileError
from rljob_trainer.models.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz :+=", 64)


def write(folder: Path, **files: Sequence[Mapping[str, Any]]) -> None:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def feed(folder: Path, *parts: Mapping[str, Any], **train: Any) -> PromptFeed:
    named = [{"source": f"{part['name']}.jsonl", **part} for part in parts]
    data = Data.model_validate({"train": {"parts": named, **train}, "prompt": "q", "answer": "a"})
    return training_feed(data, TOKENIZER, base=folder)


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"q": str(i), "a": str(i), **more} for i in range(count)]


def take(of: PromptFeed, count: int) -> list[Prompt]:
    taken = [of.next() for _ in range(count)]
    assert None not in taken
    return taken  # type: ignore[return-value]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_shares_of_every_epochs_prompts(tmp_path: Path, shuffle: bool) -> None:
    write(tmp_path, large=rows(70), small=rows(20), tiny=rows(10))
    parts = [{"name": "large", "weight": 1}, {"name": "small", "weight": 2}, {"name": "tiny", "weight": 1}]
    prompts = take(feed(tmp_path, *parts, shuffle=shuffle), 700)
    for epoch in range(7):
        of_epoch = prompts[100 * epoch : 100 * (epoch + 1)]
        assert {p.epoch for p in of_epoch} == {epoch}
        assert Counter(p.source for p in of_epoch) == {"large": 25, "small": 50, "tiny": 25}
    for name, size in (("large", 70), ("small", 20), ("tiny", 10)):
        # Pass after pass: no row comes again before every other one of its source has come, but for the order in an
        # epoch in which a pass ends.
        visits = Counter(p.row for p in prompts if p.source == name)
        total = sum(visits.values())
        assert set(visits) == set(range(size))
        assert set(visits.values()) <= {total // size, -(-total // size)}
    if shuffle:
        assert [p.source for p in prompts[:100]] != [p.source for p in prompts[100:200]]
    else:
        assert [p.source for p in prompts[:8]] == ["small", "large", "tiny", "small"] * 2
        assert [p.row for p in prompts if p.source == "tiny"][:12] == [*range(10), 0, 1]


def test_without_weights_every_row_comes_once_an_epoch(tmp_path: Path) -> None:
    write(tmp_path, large=rows(7), small=rows(3))
    prompts = take(feed(tmp_path, {"name": "large"}, {"name": "small"}), 10)
    assert sorted((p.source, p.row) for p in prompts) == [("large", i) for i in range(7)] + [
        ("small", i) for i in range(3)
    ]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_shares_are_the_nearest_whole_numbers_with_the_right_sum(given: list[tuple[int, int]]) -> None:
    sizes, weights = [size for size, _ in given], [float(weight) for _, weight in given]
    found = shares(sizes, weights)
    assert found is not None
    assert sum(found) == sum(sizes)
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - Fraction(weight) / Fraction(sum(weights)) * sum(sizes)) < 1


@given(st.integers(0, 90), st.booleans(), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_mixture_goes_on_where_it_stopped(
    tmp_path_factory: pytest.TempPathFactory, position: int, shuffle: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    sources = [{"q": str(i), "a": "", "from": f"set {i}"} for i in range(45)]
    # Half of one source is too long, and left out on the way.
    write(folder, one=sources, two=[{"q": "9" * (5 + 80 * (i % 2)), "a": "", "from": "two"} for i in range(4)])
    parts = [{"name": "one", "weight": 0.75}, {"name": "two", "weight": 0.25}]

    def made() -> PromptFeed:
        mixed = feed(folder, *parts, shuffle=shuffle, seed=seed, sourceColumn="from")
        return mixed

    whole = take(made(), 100)
    first = made()
    take(first, position)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = made()
    resumed.load_state_dict(state)
    assert take(resumed, 100 - position) == whole[position:]
    assert OTHER in {prompt.counted_as for prompt in whole}
    again = resumed.prompt_at(ordinal=7, epoch=whole[7].epoch, source=whole[7].source, row=whole[7].row)
    assert again == whole[7]


def test_other_weights_are_another_order(tmp_path: Path) -> None:
    write(tmp_path, one=rows(5), two=rows(5))
    begun = feed(tmp_path, {"name": "one", "weight": 1}, {"name": "two", "weight": 1})
    other = feed(tmp_path, {"name": "one", "weight": 1}, {"name": "two", "weight": 2})
    with pytest.raises(CheckpointError, match=r"belongs to weights = \[1.0, 1.0\], but the job has \[1.0, 2.0\]"):
        other.load_state_dict(begun.state_dict())


def test_a_weight_too_small_for_one_prompt_is_refused(tmp_path: Path) -> None:
    write(tmp_path, one=rows(5), two=rows(5))
    with pytest.raises(JobFileError, match="none of the 10 prompts of an epoch come from 'two'; raise the weight"):
        feed(tmp_path, {"name": "one", "weight": 1}, {"name": "two", "weight": 0.01})


def test_parts_have_columns_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, one=rows(1), two=[{"task": {"text": "two"}, "truth": [1, 2]}])
    parts = [{"name": "one"}, {"name": "two", "prompt": "do: {task.text}", "answer": "truth"}]
    by_source = {p.source: p for p in take(feed(tmp_path, *parts), 2)}
    assert (by_source["one"].text, by_source["one"].answer) == ("0", "0")
    assert (by_source["two"].text, by_source["two"].answer) == ("do: two", "[1, 2]")
    assert by_source["two"].reference == [1, 2]
    with pytest.raises(
        JobFileError, match=r"spec.data.train.parts\[1\].answer: data source 'two' has no column 'turth'"
    ):
        feed(tmp_path, parts[0], {**parts[1], "answer": "turth"})


def test_generated_tasks_in_a_mixture(tmp_path: Path) -> None:
    write(tmp_path, one=rows(10))
    task = {"name": "sums", "task": {"type": "addition", "digits": 1}, "source": None, "prompt": "question"}
    prompts = take(feed(tmp_path, {"name": "one"}, {**task, "answer": "answer"}), 50)
    assert {p.answer for p in prompts if p.source == "sums"} <= {f"{n:02}" for n in range(19)}


def test_a_column_says_the_data_source(tmp_path: Path) -> None:
    names = ["openai/gsm8k", "openai gsm8k", "µ", "x" * 100, 7]
    write(tmp_path, one=[{"q": str(i), "a": "", "meta": {"from": name}} for i, name in enumerate(names)])
    one = feed(tmp_path, {"name": "one"}, shuffle=False, sourceColumn="meta.from")
    prompts = take(one, 5)
    assert [p.source for p in prompts] == ["one"] * 5
    assert [p.data_source for p in prompts] == ["openai/gsm8k", "openai gsm8k", "µ", "x" * 100, "7"]
    assert [p.counted_as for p in prompts] == ["openai-gsm8k", "openai-gsm8k", "-", "x" * 64, "7"]


def test_few_data_sources_have_metrics_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, one=[{"q": "1", "a": "", "from": f"set{i}"} for i in range(100)])
    prompts = take(feed(tmp_path, {"name": "one"}, shuffle=False, sourceColumn="from"), 200)
    expected = [f"set{i}" for i in range(MOST_COUNTED)] + [OTHER] * (100 - MOST_COUNTED)
    assert [p.counted_as for p in prompts] == expected * 2


def test_a_row_that_does_not_say_its_data_source_is_named(tmp_path: Path) -> None:
    write(tmp_path, one=[{"q": "1", "a": "", "from": "x"}, {"q": "2", "a": "", "from": None}])
    with pytest.raises(DataError, match=r'one.jsonl, line 2: the column "from" \(set by spec.data.train.sourceColumn'):
        feed(tmp_path, {"name": "one"}, sourceColumn="from")
    with pytest.raises(JobFileError, match=r"spec.data.train.sourceColumn: data source 'one' has no column 'form'"):
        feed(tmp_path, {"name": "one"}, sourceColumn="form")


def test_held_out_sets_without_the_column_keep_their_names(tmp_path: Path) -> None:
    write(tmp_path, one=[{"q": "1", "a": "", "from": "x"}], two=rows(1))
    held_out = [{"name": name, "source": f"{name}.jsonl"} for name in ("one", "two")]
    train = {"source": "one.jsonl", "sourceColumn": "from"}
    data = Data.model_validate({"train": train, "validation": held_out, "prompt": "q"})
    sets = validation_sets(data, TOKENIZER, base=tmp_path)
    assert [(sets[name][0].source, sets[name][0].data_source) for name in ("one", "two")] == [
        ("one", "x"),
        ("two", None),
    ]

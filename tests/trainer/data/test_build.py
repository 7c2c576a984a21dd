"""spec.data becomes a feed and validation prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec.data import Data
from rljob_trainer.data import training_feed, validation_sets
from rljob_trainer.errors import DataError
from rljob_trainer.models.tokenizer import character_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENIZER = character_tokenizer("0123456789+=", 64)


def data(**spec: Any) -> Data:
    return Data.model_validate(spec)


def test_a_generated_task_needs_nothing_but_its_name() -> None:
    spec = data(
        train={"task": {"type": "addition", "digits": 1, "size": 50}},
        validation=[{"name": "held-out", "task": {"type": "addition", "digits": 1}, "limit": 5}],
    )
    feed = training_feed(spec, TOKENIZER)
    assert len(feed) == 50
    train = [feed.next() for _ in range(50)]
    held_out = validation_sets(spec, TOKENIZER)["held-out"]
    assert len(held_out) == 5
    assert {p.source for p in held_out} == {"held-out"}
    assert {p.text for p in train if p} & {p.text for p in held_out} == set()
    for prompt in (*train, *held_out):
        assert prompt is not None
        left, right = prompt.text.removesuffix("=").split("+")
        assert prompt.answer is not None
        assert int(prompt.answer) == int(left) + int(right)


def test_the_gsm8k_files_of_the_examples() -> None:
    with (EXAMPLES / "data/gsm8k/train.jsonl").open(encoding="utf-8") as file:
        characters = {character for line in file for character in json.loads(line)["question"]}
    tokenizer = character_tokenizer("".join(sorted(characters)), 4096)
    spec = data(train={"source": "data/gsm8k", "split": "train"}, answer="answer", maxPromptTokens=4096, chat="never")
    feed = training_feed(spec, tokenizer, base=EXAMPLES)
    assert len(feed) == 7473
    prompt = feed.next()
    assert prompt is not None
    assert prompt.source == "gsm8k"
    assert prompt.answer is not None
    assert "####" in prompt.answer


def test_parts_are_mixed_and_an_end_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    spec = data(
        train={
            "parts": [
                {"name": "tasks", "task": {"type": "copy", "digits": 1}, "limit": 3},
                {"name": "file", "source": "mine.jsonl"},
            ]
        }
    )
    feed = training_feed(spec, TOKENIZER, base=tmp_path, epochs=1)
    prompts = []
    while (prompt := feed.next()) is not None:
        prompts.append((prompt.source, prompt.answer))
    assert sorted(source for source, _ in prompts) == ["file", "tasks", "tasks", "tasks"]
    assert ("file", "2") in prompts


@pytest.mark.parametrize(
    ("source", "name"),
    [("hf://openai/gsm8k:main", "gsm8k"), ("folder/train.v2.jsonl", "train"), ("some/folder/", "folder")],
)
def test_a_source_without_a_name_is_called_after_its_path(source: str, name: str) -> None:
    from rljob_trainer.data.build import source_name

    assert source_name(data(train={"source": source}).train.sources[0]) == name


def test_a_row_without_the_answer_is_known_before_the_first_prompt(tmp_path: Path) -> None:
    rows = ['{"question": "1+1=", "answer": "2"}'] * 200
    rows[150] = '{"question": "1+1="}'
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    spec = data(train={"source": "mine.jsonl"}, prompt="{question}", answer="answer")
    message = r'mine\.jsonl, line 151: the row has no column "answer" \(set by spec\.data\.answer\); it has question;'
    with pytest.raises(DataError, match=message):
        training_feed(spec, TOKENIZER, base=tmp_path)
    first = data(train={"source": "mine.jsonl", "limit": 150}, prompt="{question}", answer="answer")
    assert len(training_feed(first, TOKENIZER, base=tmp_path)) == 150
    # Who needs no answer takes the row.
    assert len(training_feed(data(train={"source": "mine.jsonl"}), TOKENIZER, base=tmp_path)) == 200


def test_messages_name_the_part_of_the_job_file(tmp_path: Path) -> None:
    spec = data(train={"parts": [{"name": "a", "task": {"type": "copy"}}, {"name": "b", "source": "none.jsonl"}]})
    with pytest.raises(DataError, match=r"spec\.data\.train\.parts\[1\]\.source: there is no file"):
        training_feed(spec, TOKENIZER, base=tmp_path)

"""Prompts with a date in them stay what they were when a run goes on another day."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from rljob_api.spec.data import Data
from rljob_trainer.checkpoints.checkpoint import DRIVER, Checkpoint
from rljob_trainer.data import training_feed, validation_sets
from rljob_trainer.driver.feeding import date_of_prompts
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789+=- ", 64)
TOKENIZER.chat_template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
TASK = {"task": {"type": "addition", "digits": 2, "size": 20}}
DATA = Data.model_validate({"train": TASK, "validation": [{"name": "held-out", **TASK, "limit": 5}]})
YESTERDAY = datetime(2024, 7, 26, 23, 59)


def saved(folder: Path, state: object) -> Checkpoint:
    (folder / DRIVER).write_text(json.dumps(state))
    return Checkpoint(3, str(folder), lambda: folder)


def test_a_resumed_run_has_the_prompts_of_the_day_it_began(tmp_path: Path) -> None:
    began = training_feed(DATA, TOKENIZER, now=YESTERDAY)
    first = [began.next() for _ in range(3)]
    now = date_of_prompts(saved(tmp_path, {"feed": began.state_dict()}))
    assert now == YESTERDAY
    resumed = training_feed(DATA, TOKENIZER, now=now)
    resumed.load_state_dict(json.loads((tmp_path / DRIVER).read_text())["feed"])
    assert resumed.state_dict() == began.state_dict()
    again = first[0]
    assert again is not None
    assert again.text.startswith("2024-07-26 ")
    assert again == resumed.prompt_at(ordinal=0, epoch=0, source=again.source, row=again.row)
    held_out = validation_sets(DATA, TOKENIZER, now=now)["held-out"]
    assert {prompt.text[:10] for prompt in held_out} == {"2024-07-26"}


def test_prompts_of_another_day_are_other_prompts(tmp_path: Path) -> None:
    began = training_feed(DATA, TOKENIZER, now=YESTERDAY)
    another = training_feed(DATA, TOKENIZER, now=YESTERDAY + timedelta(minutes=1))
    with pytest.raises(CheckpointError, match="are tokenized differently"):
        another.load_state_dict(began.state_dict())


def test_a_run_without_a_past_or_without_dates_has_the_present_date(tmp_path: Path) -> None:
    for start in (None, saved(tmp_path, {"feed": {"date": None}})):
        assert datetime.now() - date_of_prompts(start) < timedelta(minutes=1)
    with pytest.raises(CheckpointError, match="was written by another version"):
        date_of_prompts(saved(tmp_path, {"feed": {"date": "yesterday"}}))

"""Megabytes of text in one message hold up no other episode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ASKED, CHAT, Scripted, tasks

from rljob_trainer.episodes.curfew import NoRoomError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits, Voice
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.errors import ProgramError
from rljob_trainer.world.protocol import World

LONG = {"role": "user", "content": "a few words " * 100_000}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, threading.Thread]]:
    """The length of each text that was tokenised, and where."""
    seen: list[tuple[int, threading.Thread]] = []
    encode = CHAT._encode

    def watched(texts: list[str]) -> Any:
        seen.extend((len(text), threading.current_thread()) for text in texts)
        return encode(texts)

    monkeypatch.setattr(CHAT, "_encode", watched)
    return seen


def programs(program: Any, log: EpisodeLog, prompt_tokens: int) -> Programs:
    return Programs(program, log, CHAT, EpisodeLimits(8, prompt_tokens=prompt_tokens))


async def test_what_has_no_room_is_refused_before_it_is_tokenised(
    log: EpisodeLog, encoded: list[tuple[int, threading.Thread]]
) -> None:
    async def program(task: Task, model: Voice, world: World) -> float:
        answer = await model.chat(ASKED)
        with pytest.raises(NoRoomError):
            await model.chat([*ASKED, answer.message, LONG])
        more = await model.chat([*ASKED, answer.message, {"role": "user", "content": "shorter"}])
        return float(more.text == "42")

    (episode,) = await programs(program, log, 1000).play(tasks(), Scripted("42"))
    assert episode.returned == 1.0
    assert [len(leaf.turns) for leaf in episode.leaves] == [2]
    assert max(length for length, _ in encoded) < 1000


async def test_a_first_message_without_room_says_how_long_it_is_at_least(log: EpisodeLog) -> None:
    async def program(task: Task, model: Voice, world: World) -> None:
        await model.chat([LONG])

    least = len(CHAT.render([LONG])) // max(map(len, CHAT._tokenizer.get_vocab()))
    with pytest.raises(ProgramError, match=rf"at least {least} tokens, .* raise spec\.data\.maxPromptTokens = 1000"):
        await programs(program, log, 1000).play(tasks(), Scripted("42"))


async def test_what_has_room_is_tokenised_in_a_thread(
    log: EpisodeLog, encoded: list[tuple[int, threading.Thread]]
) -> None:
    async def program(task: Task, model: Voice, world: World) -> None:
        answer = await model.chat(ASKED)
        await model.chat([*ASKED, answer.message, LONG])

    model = Scripted("42")
    await programs(program, log, 10**7).play(tasks(longest=10**7), model)
    text = CHAT.render([*ASKED, {"role": "assistant", "content": "42"}, LONG])
    assert CHAT._tokenizer.decode(model.seen[1], skip_special_tokens=False) == text
    assert [thread is threading.main_thread() for length, thread in encoded if length > 10**6] == [False]

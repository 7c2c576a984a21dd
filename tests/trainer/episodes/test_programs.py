"""An episode of many turns goes on after a kill as if nothing had happened: the same tokens, no call made twice.

The model is a real engine; what it would have said is what it says to a program that nobody kills.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from two_turns import PROMPT, SAMPLING, DyingLog, Killed, Played, Sums, play, program_of, programs, tasks

from conftest import tiny
from rljob_trainer.episodes.environment import Task, tasks_of
from rljob_trainer.episodes.episode import Episode, Group
from rljob_trainer.episodes.identity import validation_of
from rljob_trainer.episodes.log import EpisodeLog, _Command
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.receipts import check_episode
from rljob_trainer.errors import WorldFailedError, exit_code_of
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.validation.validator import sample_rows
from rljob_trainer.world.protocol import World, WorldError

LINES = 9
"""That three episodes hand over for their calls: an intent and a result of the world, and two turns, each."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def engine(model: Any) -> TorchEngine:
    return TorchEngine.from_model(model, version=3)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


def assert_same(one: list[Episode], other: list[Episode]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert (ours.id, ours.finish, len(ours.leaves)) == (theirs.id, theirs.finish, len(theirs.leaves))
        for leaf, expected in zip(ours.leaves, theirs.leaves, strict=True):
            assert leaf.prompt_ids == expected.prompt_ids
            for stream in ("ids", "versions", "mask"):
                assert np.array_equal(getattr(leaf.tokens, stream), getattr(expected.tokens, stream))
            # Another number of siblings beside it rounds otherwise.
            np.testing.assert_allclose(leaf.tokens.log_probs, expected.tokens.log_probs, atol=1e-5)
            assert [turn[:2] for turn in leaf.turns] == [turn[:2] for turn in expected.turns]
        check_episode(ours)


async def test_two_turns_are_one_leaf_with_what_the_model_was_told_in_between(
    engine: TorchEngine, log: EpisodeLog
) -> None:
    service = Sums()
    played = Played(engine)
    episodes = await programs(program_of(service), log).play(tasks(), played)
    assert (played.groups[0], sum(played.groups)) == (3, 6), "siblings are asked for together"
    for episode in episodes:
        (leaf,) = episode.leaves
        assert leaf.tokens.mask.tolist() == [True] * 6 + [False] * 2 + [True] * 6
        assert [(turn.start, turn.stop) for turn in leaf.turns] == [(0, 6), (8, 14)]
        assert leaf.tokens.ids[6] == 3 + int(leaf.tokens.ids[:6].sum()) % 90
        (scored,) = engine.score([(leaf.prompt_ids, leaf.tokens.ids.tolist())], 1.0)
        made = leaf.tokens.mask
        np.testing.assert_allclose(leaf.tokens.log_probs[made], scored[made], atol=1e-5)
        check_episode(episode)
    assert len({tuple(episode.response_ids) for episode in episodes}) == 3
    assert len({int(episode.leaves[0].tokens.ids[7]) for episode in episodes}) == 1, "the world's seed is the prompt's"


@pytest.mark.parametrize("dies_at", range(LINES + 3))
async def test_after_a_kill_at_any_line_the_episodes_are_the_same_and_nothing_is_asked_twice(
    engine: TorchEngine, tmp_path: Path, dies_at: int
) -> None:
    undisturbed, service = EpisodeLog(tmp_path / "undisturbed"), Sums()
    expected = await play(engine, undisturbed, service)
    undisturbed.close()
    assert len(service.asked) == 3

    dying, first = DyingLog(tmp_path / "episodes", dies_at), Sums()
    with suppress(Killed):
        await play(engine, dying, first)
    engine.abort()
    dying.synced().result()  # what was handed over is in the kernel's hands, which outlives a process
    recorded = sum(call.done for record in dying.records.values() for call in record.calls.values() if not call.turn)

    after, second = EpisodeLog(tmp_path / "episodes"), Sums()
    played = Played(engine)
    environment = programs(program_of(second), after)
    assert_same(await environment.play(tasks(), played), expected)
    assert environment.diverged == 0
    assert len(second.asked) == 3 - recorded
    again = set(first.asked) & set(second.asked)
    assert len(again) <= 3 - recorded, "only intents without a result are asked for again"
    turns = sum(record.turns for record in dying.records.values())
    assert sum(played.groups) == 6 - turns
    after.close()


async def test_a_line_that_is_half_on_the_disk_is_no_line(engine: TorchEngine, tmp_path: Path) -> None:
    whole = EpisodeLog(tmp_path / "episodes")
    expected = await play(engine, whole, Sums())
    whole.close()
    (segment,) = (tmp_path / "episodes").iterdir()
    data = segment.read_bytes()
    for cut in np.random.default_rng(0).integers(1, len(data), 12).tolist():
        shutil.rmtree(tmp_path / "episodes")
        (tmp_path / "episodes").mkdir()
        segment.write_bytes(data[:cut])
        torn = EpisodeLog(tmp_path / "episodes")
        torn.restore([PROMPT.ordinal], PROMPT.ordinal + 1, step=1, version=3, published_as=3)
        assert_same(await play(engine, torn, Sums()), expected)
        torn.close()


async def test_a_program_that_does_something_else_begins_anew_and_it_is_said(
    engine: TorchEngine, log: EpisodeLog, caplog: pytest.LogCaptureFixture
) -> None:
    await play(engine, log, Sums())
    expected = await play(engine, EpisodeLog(log._folder / "other"), Sums(), extra=1)
    environment = programs(program_of(Sums(), extra=1), log)
    assert_same(await environment.play(tasks(), Played(engine)), expected)
    assert (environment.continued, environment.diverged) == (3, 3)
    said = "sample 0 of prompt 5 starts over (1 of 1 so far): call 1 of the program/ask is ask with other"
    assert said in caplog.text


async def test_a_program_with_another_text_begins_anew(engine: TorchEngine, log: EpisodeLog) -> None:
    async def once(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)

    await play(engine, log, Sums())
    environment = programs(once, log)
    episodes = await environment.play(tasks(), Played(engine))
    assert environment.diverged == 3
    assert [episode.response_tokens for episode in episodes] == [6, 6, 6]


async def test_what_newer_weights_made_is_cut_and_the_world_s_answer_before_it_stays(
    model: Any, tmp_path: Path
) -> None:
    """The checkpoint's weights were version 3; the second turn was made by version 4, in the middle of which the
    process died. The next one publishes the same weights as 7, and so does the one after it as 9."""
    first, service = EpisodeLog(tmp_path / "episodes"), Sums()
    engine = TorchEngine.from_model(model, version=3)

    async def newer(requests: Any, finished: Any = None) -> Any:
        played = Played(engine if requests[0].id.turn == 0 else TorchEngine.from_model(model, version=4))
        return await played.generate(requests)

    environment = programs(program_of(service), first)
    environment_model = type("Newer", (), {"generate": staticmethod(newer)})()
    before = await environment.play(tasks(), environment_model)
    first.close()
    for number, (attempt, published) in enumerate((("second", 7), ("third", 9))):
        log, service = EpisodeLog(tmp_path / "episodes"), Sums()
        assert log.restore([PROMPT.ordinal], PROMPT.ordinal + 1, step=2, version=3, published_as=published) == {}, (
            attempt
        )
        if number == 0:
            log.close()
            continue
        played = Played(TorchEngine.from_model(model, version=published))
        after = await programs(program_of(service), log).play(tasks(), played)
        log.close()
        assert service.asked == []
        assert played.groups == [3]
        for ours, theirs in zip(after, before, strict=True):
            assert ours.leaves[0].tokens.versions.tolist() == [9] * 14
            assert ours.response_ids == theirs.response_ids  # the same weights under other numbers
            check_episode(ours)
    assert (
        EpisodeLog(tmp_path / "episodes").restore(
            [PROMPT.ordinal - 1], PROMPT.ordinal + 1, step=2, version=3, published_as=9
        )
        == {}
    )
    assert EpisodeLog(tmp_path / "episodes").records == {}


async def test_prompts_that_were_handed_out_after_the_checkpoint_keep_their_records(
    engine: TorchEngine, tmp_path: Path
) -> None:
    """The run gives them out again under the same numbers: their calls are not made again."""
    log = EpisodeLog(tmp_path / "episodes")
    expected = await play(engine, log, Sums())
    log.close()
    for next_ordinal, asked_again in ((PROMPT.ordinal + 1, True), (PROMPT.ordinal, False)):
        again, service = EpisodeLog(tmp_path / "episodes"), Sums()
        saved = again.records.copy()
        again.restore([], next_ordinal, step=2, version=3, published_as=3)
        assert bool(again.records) != asked_again
        if not asked_again:
            assert_same(await play(engine, again, service), expected)
            assert service.asked == []
        again.close()
        if asked_again:
            shutil.rmtree(tmp_path / "episodes")
            refilled = EpisodeLog(tmp_path / "episodes")
            await play(engine, refilled, Sums())
            assert refilled.records.keys() == saved.keys()
            refilled.close()


async def test_each_round_of_a_validation_asks_anew(engine: TorchEngine, tmp_path: Path) -> None:
    """Its prompts are the same in every round; what older weights said in a former one is of no use."""
    log, service = EpisodeLog(tmp_path / "episodes"), Sums()
    environment = programs(program_of(service), log)
    held_out = [replace(task, id=task.id._replace(purpose=validation_of("held out"))) for task in tasks()]
    for rounds in (1, 2):
        episodes = await environment.play(held_out, Played(engine))
        assert [episode.id.purpose for episode in episodes] == ["validation set held out"] * 3
        assert len(service.asked) == 3 * rounds
    assert (log.records, environment.continued) == ({}, 0)
    log.close()


async def test_a_process_that_dies_while_it_restores_leaves_one_time_s_numbers_or_the_other_s(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "episodes"
    log = EpisodeLog(folder)
    await play(engine, log, Sums())
    log.close()

    def versions(of: EpisodeLog) -> set[int]:
        turns = [call.turn for record in of.records.values() for call in record.calls.values()]
        return {version for turn in turns if turn is not None for version in turn.tokens.versions.tolist()}

    def killed(*_: Any) -> None:
        raise Killed

    for method, expected in (("replace", 3), ("unlink", 8)):
        dying = EpisodeLog(folder)
        monkeypatch.setattr(Path, method, killed)
        with pytest.raises(Killed):
            dying.restore([PROMPT.ordinal], PROMPT.ordinal + 1, step=2, version=3, published_as=8)
        monkeypatch.undo()
        after = EpisodeLog(folder)
        assert versions(after) == {expected}
        assert len(after.records) == 3
    # Whatever the last one left, the next one moves it from where it is.
    after.restore([PROMPT.ordinal], PROMPT.ordinal + 1, step=2, version=3, published_as=11)
    assert versions(EpisodeLog(folder)) == {11}
    assert [path.suffix for path in folder.iterdir()] == [".log"]


async def test_a_turn_that_was_cut_goes_on_from_the_tokens_that_survive(model: Any, tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes")
    expected = await play(TorchEngine.from_model(model, version=3), log, Sums())
    for record in log.records.values():
        for place, call in record.calls.items():
            if call.turn is not None and place.number == 1:
                versions = np.array([3, 3, 4, 4, 4, 5], np.int32)
                tokens = replace(call.turn.tokens, versions=versions)
                record.calls[place] = replace(call, turn=replace(call.turn, tokens=tokens))
    begun = log.restore([PROMPT.ordinal], PROMPT.ordinal + 1, step=2, version=3, published_as=6)
    assert {id.turn: turn.tokens.versions.tolist() for id, turn in begun.items()} == {1: [6, 6]}
    asked = tasks()
    for task in asked:
        task.begun.update({id.turn: turn for id, turn in begun.items() if id.sample == task.id.sample})
    played = Played(TorchEngine.from_model(model, version=6))
    after = await programs(program_of(Sums()), log).play(asked, played)
    log.close()
    assert [episode.response_ids for episode in after] == [episode.response_ids for episode in expected]
    assert played.engine.tokens_made == 3 * 4


async def test_a_failure_of_the_world_is_no_reward(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failures are waited for, four end the run; the record says what was asked meanwhile."""
    monkeypatch.setattr("rljob_trainer.episodes.play._PAUSE_SECONDS", 0.001)
    failures = [2, 9, 9]

    class Shaky(Sums):
        async def __call__(self, numbers: list[int]) -> int:
            if failures[0]:
                failures[0] -= 1
                raise WorldError("the service does not answer")
            return await super().__call__(numbers)

    service = Shaky()
    (episode,) = await programs(program_of(service), log).play(tasks(1), Played(engine))
    assert len(service.asked) == 1
    assert episode.reward is None
    failures[0] = 9
    (other,) = [task for task in tasks(2) if task.id.sample == 1]
    with pytest.raises(
        WorldFailedError, match=r"sample 1 of prompt 5: sum .* failed 4 times, the last time with: the s"
    ) as ended:
        await programs(program_of(service), log).play([other], Played(engine))
    assert exit_code_of(ended.value) == 75
    failures[0] = 0
    await programs(program_of(service), log).play([other], Played(engine))
    assert len(service.asked) == 2


async def test_a_program_that_catches_everything_does_not_hide_what_it_must_not_go_on_from(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.episodes.play._PAUSE_SECONDS", 0.001)
    number = [1]

    async def fails() -> None:
        raise WorldError("gone")

    async def careless(task: Task, model: Voice, world: World) -> None:
        first = await model.ask(task.prompt.token_ids)
        with suppress(Exception):
            await model.ask([*first.context, number[0]])
        if number[0] == 3:
            with suppress(Exception):
                await world.call("service", fails)

    async def playing() -> tuple[Programs, list[Episode]]:
        environment = programs(careless, log)
        return environment, await environment.play(tasks(1), Played(engine))

    await playing()
    number[0] = 2
    environment, (episode,) = await playing()
    assert environment.diverged == 1
    assert int(episode.leaves[0].tokens.ids[6]) == 2
    number[0] = 3
    with pytest.raises(WorldFailedError, match=r"service .* failed 4 times, the last time with: gone"):
        await playing()


async def test_a_history_that_was_rewritten_is_another_leaf(engine: TorchEngine, log: EpisodeLog) -> None:
    async def forgetful(task: Task, model: Voice, world: World) -> None:
        first = await model.ask(task.prompt.token_ids)
        second = await model.ask([*first.context, 11])
        await model.ask([*task.prompt.token_ids, *second.said])  # without the first turn
        await model.ask([*first.context, 12])  # from an earlier point of the first leaf

    for episode in await programs(forgetful, log).play(tasks(2), Played(engine)):
        kept, rewritten, branch = episode.leaves
        assert kept.tokens.mask.tolist() == [True] * 6 + [False] + [True] * 6
        assert rewritten.prompt_ids == (*PROMPT.token_ids, *kept.tokens.ids[7:].tolist())
        assert branch.prompt_ids == (*PROMPT.token_ids, *kept.tokens.ids[:6].tolist(), 12)
        assert [len(leaf.tokens) for leaf in (rewritten, branch)] == [6, 6]
        check_episode(episode)


async def test_calls_at_the_same_time_are_told_apart_by_their_branches(
    engine: TorchEngine, log: EpisodeLog, tmp_path: Path
) -> None:
    asked: list[str] = []

    def program(slow_first: bool) -> Any:
        async def program(task: Task, model: Voice, world: World) -> None:
            async def look(name: str, slow: bool) -> str:
                await asyncio.sleep(0.02 if slow else 0)
                asked.append(name)
                return name

            names = await asyncio.gather(
                world.branch("left").call("look", look, "a", slow_first),
                world.branch("right").call("look", look, "b", not slow_first),
            )
            assert names == ["a", "b"]
            await model.ask(task.prompt.token_ids)

        return program

    environment = programs(program(slow_first=True), log)
    await environment.play(tasks(1), Played(engine))
    assert asked == ["b", "a"]
    await environment.play(tasks(1), Played(engine))
    assert (asked, environment.diverged) == (["b", "a"], 0)


async def test_segments_go_with_the_last_episode_in_them(engine: TorchEngine, tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes", segment_bytes=600)
    await play(engine, log, Sums())
    log.synced().result()
    assert len(list((tmp_path / "episodes").iterdir())) > 5
    for task in tasks():
        log.over(task.id)
    log.synced().result()
    assert len(list((tmp_path / "episodes").iterdir())) == 1
    log.close()
    assert EpisodeLog(tmp_path / "episodes").records == {}


async def test_a_disk_that_takes_no_line_ends_the_run(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rljob_trainer.episodes.log.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        await play(engine, log, Sums())
    monkeypatch.undo()
    log._failure = None  # for the fixture, which closes it


class FullDisk:
    """A file that takes nothing."""

    def __init__(self, file: Any) -> None:
        self.fileno, self.close, self.flush = file.fileno, file.close, file.flush

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_a_line_that_cannot_be_written_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line fails before the thread comes to those who wait for it, and to the log's end."""
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: FullDisk(opened(path, mode)))
    log = EpisodeLog(tmp_path / "episodes")
    hold = threading.Event()
    monkeypatch.setattr(log, "_next", lambda due, next=log._next: (hold.wait(), next(due))[1])
    log._work.put(_Command())  # the thread may be in the former one
    log.begin(tasks(1)[0].id, "program")
    waiting = [log.synced(), log.synced()]
    hold.set()
    for done in waiting:
        with pytest.raises(OSError, match="No space left"):
            done.result(timeout=10)
    with pytest.raises(OSError, match="No space left"):
        log.begin(tasks(1)[0].id, "program")
    closing = threading.Thread(target=_closed, args=(log,), daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def _closed(log: EpisodeLog) -> None:
    with suppress(OSError):
        log.close()


async def test_who_said_what_can_be_read(engine: TorchEngine, log: EpisodeLog) -> None:
    """Also where a program shows the model another history."""

    async def rewrites(task: Task, model: Voice, world: World) -> None:
        first = await model.ask(task.prompt.token_ids)
        await model.ask([*first.context, 3, 4])
        await model.ask([5, 6])

    (episode,) = await programs(rewrites, log).play(tasks(1), Played(engine))
    (row,) = sample_rows([Group(PROMPT, [episode])], 1, lambda ids: [" ".join(map(str, one)) for one in ids])
    said = [
        " ".join(map(str, leaf.tokens.ids[turn.start : turn.stop])) for leaf in episode.leaves for turn in leaf.turns
    ]
    assert [(turn["by"], turn["text"]) for turn in row.turns] == [
        ("model", said[0]),
        ("environment", "3 4"),
        ("model", said[1]),
        ("rewritten history", "5 6"),
        ("model", said[2]),
    ]

    async def once(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)

    (episode,) = await programs(once, log).play(tasks_of(replace(PROMPT, ordinal=6), [0], SAMPLING, 1), Played(engine))
    (row,) = sample_rows([Group(PROMPT, [episode])], 1, lambda ids: [""] * len(ids))
    assert row.turns == ()

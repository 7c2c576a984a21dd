"""The engine's thread: atomic submission, long polls, errors that surface where someone waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from small_episodes import named
from transformers import PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.weights.manifest import Manifest, Version
from rljob_trainer.weights.receiver import ReceiveReport


def ask(name: str, length: int, prompt: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(named(name), prompt, SamplingSettings(max_tokens=length), seed=0)


@pytest.fixture
def loop(llama: PreTrainedModel) -> Iterator[EngineLoop]:
    loop = EngineLoop(lambda: TorchEngine.from_model(llama, max_concurrent=8), "e0")
    yield loop
    loop.close()


def collect_all(loop: EngineLoop, count: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    while len(results) < count:
        new = loop.collect(30)
        assert new, "a poll of 30 s brought nothing"
        results += new
    return results


def test_results_arrive_while_others_still_run(loop: EngineLoop) -> None:
    loop.submit([ask("long", 250), ask("short", 1)])
    assert [result.id.purpose for result in loop.collect(30)] == ["short"]
    assert loop.status().running == 1
    assert [result.id.purpose for result in loop.collect(30)] == ["long"]


def test_a_poll_that_lingers_brings_what_finishes_meanwhile(loop: EngineLoop) -> None:
    # Eight rows: the first eight finish together, the others after them.
    loop.submit([ask(str(i), 20) for i in range(12)])
    assert len(loop.collect(30)) == 8
    assert len(loop.collect(30)) == 4
    loop.submit([ask(str(i), 20) for i in range(12)])
    began = time.monotonic()
    assert len(loop.collect(30, 30)) == 12
    assert time.monotonic() - began < 30, "the engine was out of work long before"
    assert loop.collect(0.01, 30) == []


def test_a_submission_enters_whole_or_not_at_all(loop: EngineLoop) -> None:
    with pytest.raises(ValueError, match="of bad: "):
        loop.submit([ask("good", 5), ask("bad", 5, (1,) * 300)])
    status = loop.status()
    assert (status.running, status.waiting) == (0, 0)
    loop.submit([ask("next", 5)])
    assert [result.id.purpose for result in collect_all(loop, 1)] == ["next"]


def test_no_step_during_an_update_and_requests_go_on_with_the_new_version(loop: EngineLoop) -> None:
    made: list[int] = []

    def receive(engine: Engine) -> Manifest:
        made.append(engine.tokens_made)
        time.sleep(0.05)
        made.append(engine.tokens_made)
        return Manifest([])

    loop.submit([ask("a", 200)])
    loop.update(receive, 1)
    assert made[0] == made[1] < 200
    assert not loop.status().updating
    (result,) = collect_all(loop, 1)
    assert sorted(set(result.tokens.versions.tolist())) in ([0, 1], [1])
    assert loop.status().version == 1


def test_a_failed_update_leaves_the_engine_silent_until_one_succeeds(loop: EngineLoop) -> None:
    def fail(engine: Engine) -> Manifest:
        raise EngineError("half of the weights are here")

    loop.submit([ask("a", 5)])
    collect_all(loop, 1)
    with pytest.raises(EngineError, match="before it joined a weight group"):
        loop.receive_weights(1, timeout=1)
    loop.submit([ask("b", 5)])
    assert loop.collect(0.1) == []
    with pytest.raises(EngineError, match="half of the weights"):
        loop.update(fail, 1)
    assert loop.status().updating
    assert loop.collect(0.1) == []
    loop.update(lambda engine: Manifest([]), 1)
    assert collect_all(loop, 1)[0].tokens.versions.tolist() == [1] * 5


def test_the_report_of_an_update_says_how_long_no_token_was_made(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(engine: TorchEngine, version: int, timeout: float) -> ReceiveReport:
        time.sleep(0.05)
        return ReceiveReport(Version(version, ""), nbytes=7, seconds=0.01, manifest_seconds=0.0, peak_buffer_bytes=0)

    monkeypatch.setattr(TorchEngine, "receive_weights", receive)
    report = loop.receive_weights(3, timeout=1)
    assert (report.version.number, report.nbytes, report.seconds) == (3, 7, 0.01)
    assert report.pause_seconds >= 0.05


def test_sleeping_requests_go_on_after_wake(loop: EngineLoop) -> None:
    loop.submit([ask("a", 100)])
    loop.sleep()
    assert loop.status().asleep
    loop.submit([ask("b", 3)])
    assert loop.collect(0.05) == []
    loop.wake()
    assert {result.id.purpose for result in collect_all(loop, 2)} == {"a", "b"}


def test_an_error_in_a_step_reaches_whoever_waits_and_every_later_call(llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_model(llama)
    loop = EngineLoop(lambda: engine, "e7")
    waiting = threading.Event()
    errors: list[BaseException] = []

    def poll() -> None:
        waiting.set()
        try:
            loop.collect(30)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    waiting.wait()
    # A parameter of a wrong shape: the next step cannot run.
    engine._decoder._head = torch.ones(3, 5)
    loop.submit([ask("a", 50)])
    thread.join(30)
    assert not thread.is_alive()
    assert "engine e7 failed: RuntimeError" in str(errors[0])
    for call in (loop.status, loop.wait_until_ended, lambda: loop.collect(1), lambda: loop.submit([ask("b", 1)])):
        with pytest.raises(EngineError, match="engine e7 failed"):
            call()
    loop.close()


def test_a_call_that_outlasts_its_deadline_names_the_engine(loop: EngineLoop) -> None:
    with pytest.raises(DeadlineError, match=r"engine e0 did not answer within 0\.01 s"):
        loop.call(lambda engine: time.sleep(0.3), timeout=0.01)


def test_an_engine_that_cannot_be_built_says_why() -> None:
    def build() -> Engine:
        raise ValueError("no such folder")

    with pytest.raises(ValueError, match="no such folder"):
        EngineLoop(build, "e0")


def test_calls_after_close_are_refused(llama: PreTrainedModel) -> None:
    loop = EngineLoop(lambda: TorchEngine.from_model(llama), "e0")
    loop.close()
    with pytest.raises(EngineError, match="engine e0 has been closed"):
        loop.status()
    loop.wait_until_ended()

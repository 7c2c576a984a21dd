"""A thread that drives one engine: requests go in, results come out, everything else happens between two steps.

An ``Engine`` is single-threaded; this is its thread. Every public method may be called from any thread and blocks
until it has an answer. ``actor.py`` puts it behind Ray; a learner rank that shares its weights with a colocated torch
engine uses it as it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import Receipts
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.rollout.columns import Results
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.residence import Resident

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing."""

    name: str
    version: int
    running: int
    waiting: int
    tokens_made: int
    busy_seconds: float
    """Time spent in ``step`` since the start."""
    asleep: bool
    updating: bool


class EngineLoop:
    """Runs the engine that ``build`` returns; ``name`` stands in every error.

    An exception in ``step`` ends the engine: it is raised, as an ``EngineError`` that names the engine, from the calls
    that wait and from every later one. An exception in anything else is the caller's, and the engine goes on.
    """

    def __init__(self, build: Callable[[], Engine], name: str) -> None:
        self.name = name
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._outbox = Results()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._idle = True
        self._asleep = False
        self._updating = False
        self._busy_seconds = 0.0
        self._receipts = Receipts()
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name=f"engine-{name}", daemon=True)
        self._thread.start()
        built.result()

    # ------------------------------------------------------------------ requests

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues all requests, together and in order, or raises ``ValueError`` and queues none."""

        def enter(engine: Engine) -> None:
            added: list[EpisodeId] = []
            try:
                for request in requests:
                    engine.add(request)
                    self._receipts.take(request)
                    added.append(request.id)
            except ValueError:
                self._receipts.write(engine.abort(added))
                raise

        self.call(enter)

    def collect(self, wait_seconds: float, linger_seconds: float = 0.0) -> Results:
        """What has finished since the last call. Waits up to ``wait_seconds`` for the first result, and then up to
        ``linger_seconds`` for more, while the engine has work."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closed, wait_seconds)
            if self._outbox and linger_seconds > 0:
                self._changed.wait_for(lambda: self._idle or self._closed, linger_seconds)
            if not self._outbox:
                self._check()
            results, self._outbox = self._outbox, Results()
            return results

    def abort(self, ids: Iterable[EpisodeId] | None = None) -> Results:
        """Ends the named (or all) requests and returns what they have. Finished ones come from ``collect``."""
        wanted = None if ids is None else list(ids)
        return Results(self.call(lambda engine: self._with_receipts(engine.abort(wanted))))

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        return self.call(lambda engine: engine.score(sequences, temperature))

    # ------------------------------------------------------------------ state

    def update(self, receive: Callable[[Engine], Manifest], version: int) -> Manifest:
        """One whole update in which ``receive`` calls ``engine.load`` (or nothing, when weights are shared) and returns
        the manifest of the weights; requests stay where they are. If it fails, the engine samples nothing until an
        update succeeds."""

        def whole(engine: Engine) -> Manifest:
            self._updating = True
            engine.begin_update()
            manifest = receive(engine)
            engine.finish_update(version, manifest)
            self._updating = False
            return manifest

        return self.call(whole)

    def weight_ranks(self) -> int:
        """How many members of a weight group the engine is."""
        return self.call(lambda engine: engine.weight_ranks)

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None:
        """Joins a weight group; blocks the engine until all members are there."""
        self.call(lambda engine: engine.join_weights(link, first_rank, timeout))

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        """One whole update from the weight group. If it fails, the engine may hold a mixture of weights: it samples
        nothing until an update succeeds."""

        def receive(engine: Engine) -> ReceiveReport:
            self._updating = True
            started = time.perf_counter()
            report = engine.receive_weights(version, timeout)
            self._updating = False
            return replace(report, pause_seconds=time.perf_counter() - started)

        return self.call(receive)

    def resident(self, in_any_order: bool = False) -> Resident | None:
        """What the engine says of its weights (``Engine.resident``)."""
        return self.call(lambda engine: engine.resident(in_any_order))

    def sleep(self, keep_weights: bool = True) -> None:
        def fall_asleep(engine: Engine) -> None:
            self._asleep = True
            engine.sleep(keep_weights)

        self.call(fall_asleep)

    def wake_weights(self) -> None:
        self.call(lambda engine: engine.wake_weights())

    def wake(self) -> None:
        def wake(engine: Engine) -> None:
            engine.wake()
            self._asleep = False

        self.call(wake)

    def status(self) -> EngineStatus:
        return self.call(
            lambda engine: EngineStatus(
                self.name,
                engine.version,
                engine.running,
                engine.waiting,
                engine.tokens_made,
                self._busy_seconds,
                self._asleep,
                self._updating,
            )
        )

    def call(self, function: Callable[[Engine], T], timeout: float | None = None) -> T:
        """Runs ``function`` on the engine's thread, between two steps, and returns what it returns."""
        answer: Future[T] = Future()
        with self._changed:
            self._check()
            self._inbox.append((function, answer))
            self._changed.notify_all()
        try:
            return answer.result(timeout)
        except TimeoutError as error:
            if answer.done():
                raise
            raise DeadlineError(f"engine {self.name} did not answer within {timeout:g} s") from error

    def wait_until_ended(self) -> None:
        """Blocks for as long as the engine lives; raises why it failed. Whoever calls it from another process learns of
        that process's death too, without asking again and again."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed)
        if self._failure is not None:
            raise self._ended()

    def fail(self, error: EngineError) -> None:
        """The engine is no more, as its owner has learned in another thread: like an exception in ``step``."""
        with self._changed:
            if not self._closed:
                self._failure = error
                self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and the engine after the present step; later calls raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self, build: Callable[[], Engine], built: Future[None]) -> None:
        try:
            engine = build()
        except BaseException as error:  # noqa: BLE001  (raised again by the constructor)
            self._failure = error
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._inbox or self._may_step(engine))
                    commands, self._inbox = self._inbox, deque()
                for function, answer in commands:
                    try:
                        answer.set_result(function(engine))
                    except BaseException as error:  # noqa: BLE001  (the caller's, whatever it is)
                        answer.set_exception(error)
                results = self._step(engine) if self._may_step(engine) else []
                with self._changed:
                    self._idle = not engine.has_work
                    self._outbox += results
                    if results:
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (raised from every call that waits)
            self._failure = self._failure or error
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            abandoned, self._inbox = self._inbox, deque()
        for _, answer in abandoned:
            answer.set_exception(self._ended())
        engine.close()

    def _may_step(self, engine: Engine) -> bool:
        return engine.has_work and not (self._asleep or self._updating or self._closed)

    def _step(self, engine: Engine) -> list[GenerationResult]:
        started = time.perf_counter()
        results = engine.step()
        self._busy_seconds += time.perf_counter() - started
        return self._with_receipts(results)

    def _with_receipts(self, results: list[GenerationResult]) -> list[GenerationResult]:
        self._receipts.write(results)
        return results

    def _check(self) -> None:
        """Raises if the thread has ended."""
        if self._closed:
            raise self._ended()

    def _ended(self) -> EngineError:
        if self._failure is None:
            return EngineError(f"engine {self.name} has been closed")
        error = EngineError(f"engine {self.name} failed: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

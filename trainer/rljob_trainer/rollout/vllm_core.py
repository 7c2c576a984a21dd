"""Where vLLM's core is (scheduler, model and cache): in this process, or in one of its own.

In this process a step is a call and nothing happens between two of them. In its own the core runs on by itself: while
this process takes in the tokens of one step it computes the next. What must not happen while it runs (weights come,
requests are set aside) happens between ``settle`` and ``resume``.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

import cloudpickle  # type: ignore[import-untyped]
from vllm import EngineArgs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.vllm_transfer import OWNER, VLLMWorker

T = TypeVar("T")
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0
"""How long a process may still be there of which vLLM says that it is dead."""
Ended = Callable[[EngineError], None]


class VLLMCore(Protocol):
    """The way to the core of one ``LLMEngine``, for one thread."""

    def workers(self, call: Callable[[VLLMWorker], T]) -> list[T]:
        """What ``call`` returns in each worker. Its errors are raised as they are."""
        ...

    def step(self) -> list[Any]:
        """vLLM's outputs of one step, or of what the core has computed by itself."""
        ...

    def settle(self) -> Iterator[Any]:
        """Nothing runs afterwards, until ``resume``: yields vLLM's outputs of what was under way."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


def start_core(arguments: EngineArgs, *, own_process: bool, ended: Ended) -> tuple[LLMEngine, VLLMCore]:
    """``ended`` is told, in a thread of its own, when a core's own process ends unasked."""
    config = arguments.create_engine_config()
    # Not by from_engine_args, which asks the environment.
    start = partial(LLMEngine, config, Executor.get_class(config), log_stats=False, multiprocess_mode=own_process)
    if not own_process:
        return (here := start()), CoreHere(here)
    # Its processes end with this one, however that ends (``vllm_transfer.end_with_owner``).
    os.environ[OWNER] = str(os.getpid())
    try:
        engine = start()
    finally:
        del os.environ[OWNER]
    return engine, CoreProcess(engine, ended)


class CoreHere:
    """A core in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def workers(self, call: Callable[[VLLMWorker], T]) -> list[T]:
        collective: Any = self._engine.collective_rpc
        answers: list[T] = collective(call)
        return answers

    def step(self) -> list[Any]:
        return self._engine.step()

    def settle(self) -> Iterator[Any]:
        # On a GPU vLLM schedules a batch before it has taken in the last one's tokens, and gives tokens the version
        # of the moment in which it takes them in: those of a batch that outlived an update would count as the new
        # weights'.
        client: Any = self._engine.engine_core
        core = client.engine_core
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                yield from self._engine.step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def resume(self) -> None:
        """It makes no step unless it is told to."""

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class CoreProcess:
    """A core in a process of its own."""

    def __init__(self, engine: LLMEngine, ended: Ended) -> None:
        self._engine = engine
        client: Any = engine.engine_core
        self._client = client
        self._closing = threading.Event()
        self._ended = ended
        self.processes: list[Any] = list(client.resources.engine_manager.processes)
        self._thread = threading.current_thread()
        """The only one that asks anything of the core."""
        threading.Thread(target=self._watch, name="vllm-core-watch", daemon=True).start()

    def workers(self, call: Callable[[VLLMWorker], T]) -> list[T]:
        # Between the processes vLLM would make dictionaries of our records, and sentences of our errors.
        answers: list[T] = []
        for told in self._engine.collective_rpc("rljob_run", args=(cloudpickle.dumps(call),)):
            answer, error = pickle.loads(told)
            if error is not None:
                raise error
            answers.append(answer)
        return answers

    def step(self) -> list[Any]:
        """Raises ``EngineError`` naming the process when vLLM says that its core is dead because that has ended."""
        try:
            return self._engine.step()
        except EngineDeadError as dead:
            # vLLM may notice before we do, and says nothing of the reason.
            if wait([process.sentinel for process in self.processes], _END_SECONDS):
                raise self._its_end() from dead
            raise

    def settle(self) -> Iterator[Any]:
        # Answered when nothing is under way. Outputs came before the answer, by the same way.
        self._client.call_utility("pause_scheduler", "keep", False)
        while not self._client.outputs_queue.empty():
            yield from self.step()

    def resume(self) -> None:
        self._client.call_utility("resume_scheduler")

    def close(self) -> None:
        self._closing.set()
        self._client.shutdown()

    def _its_end(self) -> EngineError:
        names = ", ".join(str(process.pid) for process in self.processes)
        return EngineError(f"vLLM's own process ({names}) ended unexpectedly; see its last lines in the log")

    def _watch(self) -> None:
        """vLLM's client waits for ever for the answers of a process that was killed."""
        wait([process.sentinel for process in self.processes])
        # Without close(), too, vLLM ends it when this process comes to its own end.
        if self._closing.is_set() or not threading.main_thread().is_alive():
            return
        error = self._its_end()
        self._client.outputs_queue.put_nowait(error)
        # Whoever is told may wait for an engine that is being built, and this for an answer.
        threading.Thread(target=self._ended, args=(error,), name="vllm-core-ended", daemon=True).start()
        # More may be asked for until vLLM has noticed by itself, or the engine has.
        while self._thread.is_alive() and not self._closing.is_set():
            for answer in list(self._client.utility_results.values()):
                # Not answered in the meantime: what came before the end is still read, in another thread.
                with suppress(InvalidStateError):
                    answer.set_exception(error)
            self._closing.wait(_LOOK_SECONDS)

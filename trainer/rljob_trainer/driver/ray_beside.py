"""Ray beside the event loop: started, watched and ended by a thread, so that nothing it does can stop the driver.

Without its head's server (GCS) Ray can neither start nor replace a process; calls that need it wait for a minute, and
then Ray ends the driver without a word. So the thread asks that server every second, and what runs inside
``ray_beside`` is cancelled as soon as it is known to be gone.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.errors import EngineError, LearnerError, RLJobError

_PAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0
"""Of silence. After 60 s Ray would end the driver."""
_END_SECONDS = 20.0
"""Ray takes 6 s to end without its server. Whatever it hangs in, its processes end with the driver's."""
_LISTEN_SECONDS = 0.05
"""How soon signals are heard again that Ray leaves to the kernel while it ends."""
_WATCHED = ("gcs_server", "raylet")
_GRACE_SECONDS = 2.0
"""Within which a raylet has ended whose processes have."""
_AGENT_FAILED = b"one Ray agent failed"


class RayLostError(RLJobError):
    """The processes of Ray that all ranks and engines depend on are gone (exit code 75: try again)."""

    exit_code = 75


@asynccontextmanager
async def ray_beside(cpus: int, listen: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """``ray_for_run``, which see, for a coroutine. Raises ``RayLostError`` in place of whatever goes on inside when Ray
    is lost meanwhile.

    ``listen`` takes signals: it is called when Ray may have taken them, or has left SIGTERM to the kernel, which it
    does when it ends.
    """
    task = asyncio.current_task()
    assert task is not None
    ray = _Ray(cpus, asyncio.get_running_loop(), task)
    try:
        await ray.up
        listen()
        yield
    except BaseException as error:
        if isinstance(error, LearnerError | EngineError):
            await ray.look_again()
        if ray.lost is not None:
            task.uncancel()
            raise ray.lost from error
        raise
    finally:
        await ray.end(listen)
    if ray.lost is not None:
        task.uncancel()
        raise ray.lost


class _Ray:
    """The thread that Ray lives in. It has to be one for all: the kernel ends Ray's processes with the thread that
    started them."""

    def __init__(self, cpus: int, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        self.lost: RayLostError | None = None
        self._cpus, self._loop, self._task = cpus, loop, task
        self._to_end, self._ended = threading.Event(), asyncio.Event()
        begun: Future[None] = Future()
        self.up = asyncio.wrap_future(begun)
        # A daemon: a process that ends does not wait for a call that hangs.
        threading.Thread(target=self._live, args=(begun,), name="ray", daemon=True).start()

    async def look_again(self) -> None:
        """A rank or an engine has failed. A raylet that ends takes its processes with it, and is seen to have ended
        only after them: it is given a moment, lest they be blamed."""
        until = time.monotonic() + _GRACE_SECONDS
        while self.lost is None and time.monotonic() < until:
            try:
                if (reason := await asyncio.to_thread(_gone)) is not None:
                    self.lost = _lost(reason)
                    return
                await asyncio.sleep(_GRACE_SECONDS / 20)
            except asyncio.CancelledError:  # by ``_lose``, which says why, or by somebody else
                if self.lost is None:
                    raise

    async def end(self, listen: Callable[[], None]) -> None:
        """Ends Ray, and gives up waiting for that in the end."""
        self._to_end.set()
        until = time.monotonic() + _END_SECONDS
        while not self._ended.is_set() and time.monotonic() < until:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _LISTEN_SECONDS)
            listen()

    def _live(self, begun: Future[None]) -> None:
        try:
            with ray_for_run(self._cpus, lambda: not self._to_end.is_set()):
                if begun.set_running_or_notify_cancel():
                    begun.set_result(None)
                    self._watch()
        except BaseException as error:  # noqa: BLE001  whoever awaits ``up`` is told
            if not begun.done():
                begun.set_exception(error)
        finally:
            self._tell(self._ended.set)

    def _watch(self) -> None:
        from ray._private import worker

        head: Any = worker.global_worker.gcs_client  # type: ignore[attr-defined]  # set when it connects
        answered = time.monotonic()
        while not self._to_end.wait(_PAUSE_SECONDS):
            gone = _gone()
            if gone is None:
                try:
                    head.internal_kv_exists(b"rljob", namespace=b"rljob", timeout=_ANSWER_SECONDS)
                    answered = time.monotonic()
                except Exception as error:  # noqa: BLE001  Ray has many; what they say is passed on
                    silent = time.monotonic() - answered
                    if silent >= _PATIENCE_SECONDS:
                        gone = f"Ray's gcs_server has not answered for {silent:.0f} s ({error})"
            if gone is not None:
                self._tell(lambda reason=gone: self._lose(reason))
                self._to_end.wait()

    def _lose(self, reason: str) -> None:
        if self._to_end.is_set() or self.lost is not None:
            return
        self.lost = _lost(reason)
        self._task.cancel()

    def _tell(self, what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(what)


def _lost(reason: str) -> RayLostError:
    return RayLostError(
        f"{reason}: without it no rank or engine can be called, started or replaced. Start the run again; it resumes "
        "from its last checkpoint (check the system log for an out-of-memory kill)"
    )


def _gone() -> str | None:
    """A sentence about the process of a private Ray that has ended, if one has."""
    from ray._private import worker

    node: Any = worker._global_node
    for name in _WATCHED:
        for info in node.all_processes.get(name, ()):
            code = info.process.poll()
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                why = _why_the_raylet_ended(node) if name == "raylet" else ""
                return f"Ray's {name} (process {info.process.pid}) {how}{why}"
    return None


def _why_the_raylet_ended(node: Any) -> str:
    """What its log says of the agent, which it does not outlive."""
    for log in Path(node.get_logs_dir_path()).glob("raylet*"):
        with suppress(OSError):
            if _AGENT_FAILED in log.read_bytes():
                return ", because its agent (ray::DashboardAgent) exited"
    return ""

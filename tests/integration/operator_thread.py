"""An operator in a thread with an event loop of its own.

Not a task of the test's loop: kopf, when it ends, cancels every task of its loop that is younger than itself.
"""

from __future__ import annotations

import asyncio
import threading

from kube.crowding import crowding
from kubernetes.aio.client.configuration import Configuration

from rljob_operator.operator import Operator, Options

STOP_SECONDS = 30.0


class OperatorThread:
    """Runs an operator from construction until `stop`."""

    def __init__(self, options: Options, configuration: Configuration, *, debug: bool = False) -> None:
        self._options = options
        self._configuration = configuration
        self._debug = debug
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = threading.Event()
        self.failure: BaseException | None = None
        self.ending = False
        """It was asked to end."""
        self.operator: Operator | None = None
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._thread.start()
        self._begun.wait(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._main(), debug=self._debug)
        except asyncio.CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.failure = error

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # Of debug mode: how long a callback may take before it is reported. Waiting for a processor counts too.
        self._loop.slow_callback_duration *= crowding()
        self.operator = Operator(self._options, self._configuration)
        self._begun.set()
        await self.operator.run()

    def cancel(self) -> None:
        """Asks it to end, from any thread."""
        self.ending = True
        if self._loop is not None and self._task is not None and self.alive:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def stop(self) -> None:
        """Ends it at whatever it is doing."""
        self.cancel()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self.alive:
            raise RuntimeError("the operator does not end")

"""A vLLM core in its own process that has two batches under way, as on GPUs, where it schedules one before it takes in
the last one's tokens."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import cloudpickle


def _core() -> Any:
    """The core in whose process this runs: it has called its worker, which calls this."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), EngineCoreProc):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["self"]


def _deepen(worker: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState

    core = _core()
    core.batch_queue_size = 2
    core.batch_queue = deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue
    core.under_way_when_paused = []
    pause = core.scheduler.set_pause_state

    def under_way() -> int:
        return sum(batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue)

    def noted(state: PauseState) -> None:
        if state == PauseState.PAUSED_ALL:
            # The pause may have come between two batches: it comes one step later then.
            for _ in range(4):
                if under_way():
                    break
                core._process_engine_step()
            core.under_way_when_paused.append(under_way())
        pause(state)

    core.scheduler.set_pause_state = noted


def _under_way(worker: Any) -> list[int]:
    found: list[int] = _core().under_way_when_paused
    return found


def deepen(core: Any) -> None:
    """From now on two batches may be under way."""
    _told(core, _deepen)


def under_way_when_paused(core: Any) -> list[int]:
    """For each pause since then: of how many tokens batches were under way."""
    return list(_told(core, _under_way)[0])


def _told(core: Any, call: Any) -> list[Any]:
    module = sys.modules[__name__]
    # The core cannot import a test's modules.
    cloudpickle.register_pickle_by_value(module)
    try:
        return list(core.workers(call))
    finally:
        cloudpickle.unregister_pickle_by_value(module)

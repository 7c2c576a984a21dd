"""A vLLM core in its own process that takes its time, so that something can happen while requests are running there."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

STEP_SECONDS = 0.1


def _slow_down(worker: Any) -> None:
    runner = worker.model_runner
    at_speed = runner.execute_model

    @functools.wraps(at_speed)
    def slower(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        # One without tokens takes no time: a core with a queue of batches makes them in between.
        if scheduled.total_num_scheduled_tokens:
            time.sleep(STEP_SECONDS)
        return at_speed(scheduled, *args, **kwargs)

    runner.execute_model = slower


def _speed_up(worker: Any) -> None:
    worker.model_runner.execute_model = worker.model_runner.execute_model.__wrapped__


@contextmanager
def slow(core: Any) -> Iterator[None]:
    """Inside, each step of the core that makes tokens takes ``STEP_SECONDS`` longer."""
    module = sys.modules[__name__]
    # The core cannot import a test's modules.
    cloudpickle.register_pickle_by_value(module)
    try:
        core.workers(_slow_down)
        yield
        core.workers(_speed_up)
    finally:
        cloudpickle.unregister_pickle_by_value(module)

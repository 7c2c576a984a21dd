"""An engine that does not answer in time is named, with what it was asked and what can be done."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.errors import DeadlineError
from rljob_trainer.rollout.actor import EngineActor, EnginePlace
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import RayEngine


@pytest.mark.parametrize(
    ("method", "said"),
    [
        pytest.param(
            EngineLoop.receive_weights,
            r"did not load its weights within 0\.01 s: .*deadlines\.progressSeconds",
            id="slow",
        ),
        pytest.param(
            EngineActor.ready, r"did not start within 0\.01 s: .*raise deadlines\.startSeconds", id="at the start"
        ),
        pytest.param(
            EngineLoop.submit, r"did not accept its requests within 0\.01 s: it hangs in a step", id="fixed time"
        ),
        pytest.param(
            EngineLoop.status, r"did not answer status within 0\.01 s: it hangs in a step", id="a call like any other"
        ),
    ],
    ids=["slow", "at the start", "fixed time", "a call like any other"],
)
async def test_an_engine_that_does_not_answer_is_named_with_its_process_and_a_remedy(method: Any, said: str) -> None:
    never: Any = SimpleNamespace(future=Future)
    engine = RayEngine("3", lambda *_: never, lambda: None, EnginePlace("job-rollout-1", 42))
    with pytest.raises(DeadlineError, match=r"^engine 3 \(process 42 in job-rollout-1\) " + said):
        await engine.within(0.01, method)

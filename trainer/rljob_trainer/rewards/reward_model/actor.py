"""A replica of the pool of reward models, as a Ray actor."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from rljob_trainer.actor_deaths import DEATHS, cause_of_death
from rljob_trainer.aside import aside
from rljob_trainer.errors import RewardWorkerError, RLJobError
from rljob_trainer.rewards.reward_model.replica import ScoredBatch, ScorerLostError
from rljob_trainer.rewards.reward_model.served import ServedModel
from rljob_trainer.rewards.verdicts import described_error

if TYPE_CHECKING:
    from rljob_trainer.rewards.reward_model.scorer import Row, Scorer

_ACTOR_OPTIONS: Mapping[str, Any] = {"max_concurrency": 2, "max_restarts": 0}
"""One thread computes, the other one waits for the end."""


class ScorerActor:
    """What runs in the actor's process: the models, each loaded when it is first asked for."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._scorers: dict[str, Scorer] = {}

    def pod(self) -> str:
        """Where it is."""
        # KubeRay puts the pod's name there; with the host's network the host name is another one.
        return os.environ.get("RAY_CLOUD_INSTANCE_ID") or socket.gethostname()

    def scores(self, model: ServedModel, rows: Sequence[Row]) -> ScoredBatch:
        """Raises ``JobFileError`` for what is no reward model, and ``ScorerLostError`` for a device that is lost."""
        from rljob_trainer.rewards.reward_model.scorer import Scorer, settings_of

        if model.name not in self._scorers:
            self._scorers[model.name] = Scorer(settings_of(model, self._device))
        began = time.monotonic()
        scores, tokens = self._scorers[model.name].scores(rows)
        return ScoredBatch(scores, tokens, time.monotonic() - began)

    def wait_until_ended(self) -> None:
        """Returns never: who calls it learns of the process's end."""
        threading.Event().wait()


class ActorReplica:
    """The driver's side of it."""

    def __init__(self, actor: Any, pod: str, *, start_seconds: float, call_seconds: float) -> None:
        self._actor = actor
        self._pod = pod
        self._start_seconds, self._call_seconds = start_seconds, call_seconds

    @classmethod
    async def start(
        cls, device: str, options: Mapping[str, Any], *, start_seconds: float, call_seconds: float
    ) -> ActorReplica:
        """Starts an actor with these options of Ray's, and waits for its place and its process. ``call_seconds``: how
        long a batch may take.

        Raises ``RewardWorkerError``.
        """

        def create() -> Any:
            return ray.remote(ScorerActor).options(**{**_ACTOR_OPTIONS, **options}).remote(device)

        # Ray asks its head, which may be gone, to register class and actor, and answers when that has answered.
        actor = await aside(create)
        try:
            pod: str = await _answer(actor.pod.remote(), start_seconds, "did not get a slot in the cluster and start")
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        return cls(actor, pod, start_seconds=start_seconds, call_seconds=call_seconds)

    @property
    def pod(self) -> str:
        return self._pod

    async def scores(self, model: ServedModel, rows: Sequence[Row]) -> ScoredBatch:
        seconds = self._call_seconds if rows else self._start_seconds
        doing = f"did not score {len(rows)} samples" if rows else "did not load its model"
        answer: ScoredBatch = await _answer(self._actor.scores.remote(model, list(rows)), seconds, doing)
        return answer

    async def ended(self) -> str:
        try:
            await asyncio.wrap_future(self._actor.wait_until_ended.remote().future())
        except DEATHS as error:
            return cause_of_death(error)
        return "it exited"

    async def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


async def _answer(call: Any, seconds: float, doing: str) -> Any:
    """What a call returns. Raises errors of ours that the actor raised, ``ScorerLostError``, and
    ``RewardWorkerError`` for others that it raised."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(call.future())
    except TimeoutError:
        raise ScorerLostError(f"it {doing} within {seconds:.0f} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, RLJobError):
            raise error.cause from error
        # The error's own text is a traceback of many lines.
        raise RewardWorkerError(f"a replica of the reward models failed: {described_error(error.cause)}") from error
    except DEATHS as error:
        raise ScorerLostError(cause_of_death(error)) from error

"""A rank's process as a Ray actor, and the handle by which the driver calls it: one typed method for each call."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from rljob_trainer.garbage import settle
from rljob_trainer.learner.backend import BackendRank
from rljob_trainer.learner.backends import backend_of
from rljob_trainer.learner.fabric import adapters
from rljob_trainer.learner.protocol import LearnerFacts, LossSettings, ScoreRequest, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import RankReport, RankScores, Share
from rljob_trainer.models.sharing import fetch_model

P = ParamSpec("P")
T = TypeVar("T")

_BESIDE = "beside"
"""A thread of its own for what must not wait for the call that is under way."""


class RankActor:
    """What runs inside a rank's process. ``RankHandle`` says what its methods are for."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._started: BackendRank | None = None

    @property
    def _rank(self) -> BackendRank:
        assert self._started is not None
        return self._started

    def address(self) -> str:
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return f"{host}:{probe.getsockname()[1]}"

    def device(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def fabric(self) -> tuple[str, tuple[str, ...]]:
        return str(ray.util.get_node_ip_address()), adapters()

    def start(self, settings: LearnerSettings, address: str, timeout_seconds: float) -> LearnerFacts:
        if settings.model_address is not None:
            fetch_model(settings.model_path, settings.model_address)
        backend = backend_of(settings.backend, settings.code_paths)
        self._started = backend.start(settings, self._number, address, timeout_seconds)
        settle()
        return self._started.facts()

    def score(self, share: Share, request: ScoreRequest) -> RankScores:
        return self._rank.score(share, request)

    def update(self, share: Share, loss: LossSettings, request: UpdateRequest) -> RankReport:
        return self._rank.update(share, loss, request)

    def save(self, place: str | Path, belongs_to: str) -> None:
        self._rank.save(place, belongs_to)

    def load(self, place: str | Path, belongs_to: str) -> None:
        self._rank.load(place, belongs_to)

    def export(self, folder: Path) -> None:
        self._rank.export(folder)

    def rest(self, actor: bool) -> None:
        self._rank.rest(actor=actor)

    def wake(self) -> None:
        self._rank.wake()

    def run(self, function: Callable[..., T], args: tuple[object, ...]) -> T:
        return function(self._started, *args)

    @ray.method(concurrency_group=_BESIDE)
    def give_up(self) -> None:
        if self._started is not None:
            self._started.giving_up.ask()


_remote: Any = ray.remote  # its types know nothing of concurrency groups
_RANK_PROCESS: Any = _remote(concurrency_groups={_BESIDE: 1})(RankActor)


class RankHandle:
    """Calls of one rank from the driver. What is awaited is what the rank's method returns or raises."""

    def __init__(self, number: int, options: dict[str, Any]) -> None:
        """Asks Ray for the process. ``options``: Ray's, for the actor."""
        self._actor = _RANK_PROCESS.options(**options).remote(number)

    def address(self) -> Awaitable[str]:
        """A free port on its host, for the ranks to meet."""
        return self._result(self._actor.address.remote())

    def device(self) -> Awaitable[str]:
        """The GPU that Ray gave this rank."""
        return self._result(self._actor.device.remote())

    def fabric(self) -> Awaitable[tuple[str, tuple[str, ...]]]:
        """Its host and that host's RDMA adapters."""
        return self._result(self._actor.fabric.remote())

    def start(self, settings: LearnerSettings, address: str, timeout_seconds: float) -> Awaitable[LearnerFacts]:
        """Makes the backend and builds the models. All ranks at once."""
        return self._result(self._actor.start.remote(settings, address, timeout_seconds))

    def score(self, share: Share, request: ScoreRequest) -> Awaitable[RankScores]:
        return self._result(self._actor.score.remote(share, request))

    def update(self, share: Share, loss: LossSettings, request: UpdateRequest) -> Awaitable[RankReport]:
        return self._result(self._actor.update.remote(share, loss, request))

    def save(self, place: str | Path, belongs_to: str) -> Awaitable[None]:
        return self._result(self._actor.save.remote(place, belongs_to))

    def load(self, place: str | Path, belongs_to: str) -> Awaitable[None]:
        return self._result(self._actor.load.remote(place, belongs_to))

    def export(self, folder: Path) -> Awaitable[None]:
        return self._result(self._actor.export.remote(folder))

    def rest(self, *, actor: bool) -> Awaitable[None]:
        return self._result(self._actor.rest.remote(actor))

    def wake(self) -> Awaitable[None]:
        return self._result(self._actor.wake.remote())

    def run(
        self, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """``function(rank, *args)`` in the rank's process: how other parts work beside the models."""
        if kwargs:
            raise TypeError("arguments travel by position")
        return self._result(self._actor.run.remote(function, args))

    def give_up(self) -> Awaitable[None]:
        """Heard while a call works."""
        return self._result(self._actor.give_up.remote())

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        ray.kill(self._actor, no_restart=True)

    @staticmethod
    def _result(reference: Any) -> Awaitable[Any]:
        """Ray's references can be awaited, but have no types."""
        result: Awaitable[Any] = reference
        return result

"""The driver's handle of all ranks: one Ray actor each, shares out, results back in the order of the batch.

Nothing here waits without a deadline. When a rank dies or fails, the others may hang in a collective that it will never
join: the error names the one that failed first, and the whole group is ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OutOfMemoryError, RayTaskError

from rljob_trainer.actor_deaths import DEATHS, KILLED, cause_of_death
from rljob_trainer.aside import aside
from rljob_trainer.errors import LearnerError, RLJobError
from rljob_trainer.garbage import settle
from rljob_trainer.learner.bundles import Bundles, reserve
from rljob_trainer.learner.fabric import adapters, missing_fabric
from rljob_trainer.learner.metrics import update_result, usage_metrics
from rljob_trainer.learner.protocol import LearnerFacts, LossSettings, ScoreResult, SequenceBatch, UpdateResult
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import Cut, cut
from rljob_trainer.models.sharing import fetch_model

if TYPE_CHECKING:
    from rljob_trainer.learner.rank import LearnerRank

log = logging.getLogger(__name__)

_COLLECTIVE_SLACK_SECONDS = 120.0
"""For how much longer than any call the ranks' collectives wait: torch ends a process whose collective is late, and
then nobody learns whom it waited for."""
_RUN_SLACK_SECONDS = 30.0
"""For how much longer than its own deadlines (``call_seconds``) a function is waited for that runs in the ranks for
others: its error names who is late, and ours would end the learner."""
_GRACE_SECONDS = 3.0
"""After a first failure: how long to wait for news of a rank that died, which is then the one to blame."""


_QUICK_SEQUENCES = 1024
"""Of all mini-batches together. So many are cut in a millisecond, which the event loop can spare; a thread takes as
long, since the loop computes the batch's metrics meanwhile and Python lets one thread run at a time."""
_QUICK_TOKENS = 2**17
"""So many are copied in a part of that."""

_BESIDE = "beside"
"""A thread of its own for what must not wait for the call that is under way."""


class RankActor:
    """What runs inside a rank's process. ``call`` reaches everything; the rank itself is in ``rank``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rank: LearnerRank | None = None

    def address(self) -> str:
        """A free port on this host, for the ranks to meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return f"{host}:{probe.getsockname()[1]}"

    def device(self) -> str:
        """The GPU that Ray gave this rank."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def fabric(self) -> tuple[str, tuple[str, ...]]:
        """This host and its RDMA adapters."""
        return str(ray.util.get_node_ip_address()), adapters()

    def start(self, settings: LearnerSettings, address: str, timeout_seconds: float) -> LearnerFacts:
        """Builds the models. All ranks at once."""
        # Only here: the driver, which imports this module too, needs no model library.
        from rljob_trainer.learner.rank import LearnerRank

        if settings.model_address is not None:
            fetch_model(settings.model_path, settings.model_address)
        self.rank = LearnerRank(settings, self.number, address, timeout_seconds)
        settle()
        return self.rank.facts()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the rank by name."""
        assert self.rank is not None
        return getattr(self.rank, method)(*args, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function(rank, *args)`` in the rank's process: how other parts work beside the models."""
        return function(self.rank, *args, **kwargs)

    @ray.method(concurrency_group=_BESIDE)
    def give_up(self) -> None:
        """Heard while a call works."""
        if self.rank is not None:
            self.rank.giving_up.ask()


_remote: Any = ray.remote  # its types know nothing of concurrency groups
RANK_PROCESS: Any = _remote(concurrency_groups={_BESIDE: 1})(RankActor)
"""Ray's class for ``RankActor``."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How ranks are placed and how long to wait for them."""

    resources: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """Ray options of each actor: num_cpus, num_gpus, runtime_env ..."""
    bundle: Mapping[str, float] = field(default_factory=dict)
    """What is reserved for ``together`` ranks and whoever shares their devices, on as few nodes as can be; empty:
    nothing is."""
    together: int = 1
    """Ranks that one bundle is for: those whose devices one engine takes."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes on which bundles may be."""
    start_seconds: float = 600.0
    """From the request to models that are ready."""
    call_seconds: float = 3600.0
    """Longest single call (an update, a score, a save)."""

    @property
    def collective_seconds(self) -> float:
        """After how long a collective of the ranks is given up: later than every wait of ours."""
        return max(self.start_seconds, self.call_seconds + _RUN_SLACK_SECONDS) + _COLLECTIVE_SLACK_SECONDS


class LearnerGroup:
    """A ``Learner`` over Ray actors.

    Usage::

        learner = await LearnerGroup.start(LearnerSettings.from_job(job, model_path))
        result = await learner.update(batch, loss, mini_batches)
        await learner.close()
    """

    def __init__(self, settings: LearnerSettings, options: GroupOptions) -> None:
        self.settings = settings
        self.options = options
        self.actors: list[Any] = []
        self.bundles: Bundles | None = None
        """Where the ranks live, if places were reserved."""
        self.facts: LearnerFacts | None = None
        """What rank 0 said of its model and device at the start."""
        self._failed: str | None = None

    @classmethod
    async def start(cls, settings: LearnerSettings, options: GroupOptions | None = None) -> LearnerGroup:
        """Starts the ranks and waits until their models are ready. Ray must be initialised.

        Raises ``LearnerError`` when that takes longer than ``start_seconds`` or a rank fails.
        """
        group = cls(settings, options or GroupOptions())
        deadline = time.monotonic() + group.options.start_seconds
        asked = group.options.resources
        what = f"start ({group.options.bundle or asked} each; does the cluster have that?)"
        if group.options.bundle:
            group.bundles = await reserve(
                settings.ranks,
                group.options.bundle,
                group.options.start_seconds,
                group.options.nodes,
                together=group.options.together,
            )
            if group.bundles is None:
                raise LearnerError(
                    f"the cluster had no room for {settings.ranks} learner ranks within "
                    f"{group.options.start_seconds:.0f} s (deadlines.startSeconds): {what}"
                )
        places = [group.bundles.options(rank) if group.bundles else {} for rank in range(settings.ranks)]
        try:
            # Ray asks its head, which may be gone, to register class and actors, and answers when that has answered.
            group.actors = await aside(
                lambda: [RANK_PROCESS.options(**asked, **place).remote(number) for number, place in enumerate(places)]
            )
            (address,) = await group._gather(
                what, [group.actors[0].address.remote()], deadline - time.monotonic(), names=[0]
            )
            bound = group.options.collective_seconds
            left = deadline - time.monotonic()
            if group.bundles is not None:
                devices = await group._gather(what, [actor.device.remote() for actor in group.actors], left)
                group.bundles = replace(group.bundles, devices=tuple(devices))
            if settings.device == "cuda" and settings.ranks > 1:
                seen = await group._gather(what, [actor.fabric.remote() for actor in group.actors], left)
                if (missing := missing_fabric(seen)) is not None:
                    log.warning("%s", missing)
            starts = [actor.start.remote(settings, address, bound) for actor in group.actors]
            group.facts = (await group._gather(what, starts, left))[0]
        except BaseException:
            group._kill()
            raise
        return group

    # --- the Learner protocol -----------------------------------------------------------------------------------------

    async def score(
        self,
        batch: SequenceBatch,
        *,
        temperature: float,
        log_probs: bool = False,
        entropy: bool = False,
        sum_squared_probs: bool = False,
        vocabulary_kl: bool = False,
        reference: bool = False,
        values: bool = False,
        anchored: bool = False,
    ) -> ScoreResult:
        wanted = {
            "log_probs": log_probs,
            "entropy": entropy,
            "sum_squared_probs": sum_squared_probs,
            "vocabulary_kl": vocabulary_kl,
            "reference": reference,
            "values": values,
        }
        if not any(wanted.values()) or not len(batch):
            return ScoreResult()
        work = await self._cut(batch, [range(len(batch))])
        shares = [(share, temperature) for share in work.shares]
        parts = await self.call("score", per_rank=shares, anchored=anchored, **wanted)
        streams = {
            name: work.merge(batch, [part.streams[name] for part in parts], per_sequence=name == "final_values")
            for name in parts[0].streams
        }
        return ScoreResult(**streams, metrics=usage_metrics([part.usage for part in parts]))

    async def update(
        self,
        batch: SequenceBatch,
        loss: LossSettings,
        mini_batches: Sequence[Sequence[int]],
        *,
        update_actor: bool = True,
        update_critic: bool = False,
        continues: bool = False,
        keep_anchor: bool = False,
    ) -> UpdateResult:
        work = await self._cut(batch, mini_batches)
        reports = await self.call(
            "update",
            per_rank=[(share, loss) for share in work.shares],
            update_actor=update_actor,
            update_critic=update_critic,
            continues=continues,
            keep_anchor=keep_anchor,
        )
        return update_result(reports, work, batch)

    async def give_up(self) -> None:
        asked = [_result(actor.give_up.remote()) for actor in self._alive()]
        await asyncio.gather(*asked, return_exceptions=True)  # who has died is told of by the call under way

    async def save(self, place: str | Path, belongs_to: str = "") -> None:
        await self.call("save", place, belongs_to)

    async def load(self, place: str | Path, belongs_to: str = "") -> None:
        await self.call("load", place, belongs_to)

    async def export(self, folder: Path) -> None:
        await self.call("export", folder)

    async def close(self) -> None:
        """Ends the ranks' processes."""
        self._kill()

    # --- for other parts of the trainer -------------------------------------------------------------------------------

    async def offload(self, *, actor: bool = True) -> None:
        """Frees the devices for colocated engines; ``actor=False`` leaves the actor's parameters where they are."""
        await self.call("offload", actor=actor)

    async def onload(self) -> None:
        await self.call("onload")

    async def call(
        self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method of ``LearnerRank`` on all ranks at once; ``per_rank`` gives each its own first arguments."""
        own = per_rank or [()] * len(self.actors)
        references = [
            actor.call.remote(method, *mine, *args, **kwargs) for actor, mine in zip(self._alive(), own, strict=True)
        ]
        return await self._gather(method, references, self.options.call_seconds)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``function(rank, *args)`` in every rank's process at once, with its ``LearnerRank``. It keeps to
        ``call_seconds`` itself."""
        references = [actor.run.remote(function, *args, **kwargs) for actor in self._alive()]
        name = getattr(function, "__name__", repr(function))
        return await self._gather(name, references, self.options.call_seconds + _RUN_SLACK_SECONDS)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _cut(self, batch: SequenceBatch, mini_batches: Sequence[Sequence[int]]) -> Cut:
        planned = partial(
            cut,
            batch,
            mini_batches,
            ranks=self.settings.ranks,
            token_budget=self.settings.micro_batch_tokens,
            share_prompts=self.settings.share_prompts,
            halved_from=self.settings.halved_from_tokens,
        )
        quick = sum(map(len, mini_batches)) <= _QUICK_SEQUENCES and batch.token_ids.size <= _QUICK_TOKENS
        return planned() if quick else await asyncio.to_thread(planned)

    def _alive(self) -> list[Any]:
        if self._failed is not None:
            raise LearnerError(f"the learner has failed before: {self._failed}")
        return self.actors

    async def _gather(
        self, what: str, references: Sequence[Any], seconds: float, names: Sequence[int] | None = None
    ) -> list[Any]:
        """All results in order. On the first failure, or when time is up, ends the group and says who and why."""
        ranks = list(names or range(len(references)))
        tasks = [asyncio.ensure_future(_result(reference)) for reference in references]
        try:
            done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.exception() is not None for task in done)
            if not failed and not pending:
                return [task.result() for task in tasks]
            if failed and pending and not any(_died(task) for task in done):
                # A collective fails on the survivors first: give the news of a death time to arrive.
                await asyncio.wait(pending, timeout=_GRACE_SECONDS)
            raise self._failure(what, ranks, tasks, seconds)
        finally:
            for task in tasks:
                task.cancel()

    def _failure(self, what: str, ranks: list[int], tasks: list[asyncio.Task[Any]], seconds: float) -> Exception:
        errors = {
            rank: task.exception()
            for rank, task in zip(ranks, tasks, strict=True)
            if task.done() and task.exception() is not None
        }
        waiting = [rank for rank, task in zip(ranks, tasks, strict=True) if not task.done()]
        dead = {rank: error for rank, error in errors.items() if isinstance(error, DEATHS)}
        starved = next((error for error in dead.values() if isinstance(error, OutOfMemoryError)), None)
        listed = ", ".join(map(str, dead))
        cause: BaseException | None = None
        if starved is not None:
            message = f"learner rank {listed} died during {what}: {cause_of_death(starved)}"
        elif dead:
            message = f"learner rank {listed} died during {what}: {KILLED}; start again from the last checkpoint"
        elif errors:
            rank, error = next(iter(errors.items()))
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RLJobError):
                if not waiting:
                    return cause  # all ranks are through: the group can go on
                message = f"learner rank {rank} failed in {what}: {cause}"
            else:
                message = f"learner rank {rank} failed in {what}: {error}"
        else:
            listed = ", ".join(map(str, waiting))
            setting = "start" if what.startswith("start") else "progress"
            message = (
                f"learner rank {listed} did not finish {what} within {seconds:.0f} s (deadlines.{setting}Seconds): "
                "raise that if the rank is only slow; if it hangs, its log says in what, and all others wait for it in "
                "a collective"
            )
        self._failed = message
        self._kill()
        failure = LearnerError(message)
        failure.__cause__ = cause
        return failure

    def _kill(self) -> None:
        actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if self.bundles is not None:
            self.bundles.free()
            self.bundles = None
        self._failed = self._failed or "it was closed"


async def _result(reference: Any) -> Any:
    return await reference


def _died(task: asyncio.Task[Any]) -> bool:
    return isinstance(task.exception(), DEATHS)

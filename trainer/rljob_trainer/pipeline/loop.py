"""The one training loop: feed -> rollout -> reward -> batch -> learner -> publish.

All pipelines run this code. What differs (when a prompt may start, when a batch closes, when weights are
published) is the schedule's business; how anything is generated, scored or trained is that of the parts.

Every change of the world (a group finished, a version was published) calls ``_admit`` and wakes the trainer's side,
which is the only coroutine that waits; what it waits for is always in ``waits``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import DataError, DeadlineError, RLJobError, UnscoredError
from rljob_trainer.pipeline.parts import Apart, Feed, Journal, NoJournal, Rollout, StepRecord, TrainedBatch, Trainer
from rljob_trainer.pipeline.schedule import Schedule
from rljob_trainer.pipeline.tally import Tally
from rljob_trainer.telemetry.names import check
from rljob_trainer.waits import Waits, patiently

T = TypeVar("T")

Keep = Callable[[Group], str | None]
"""Says why a finished group is dropped (DAPO's dynamic sampling), or None to keep it."""

AfterStep = Callable[[StepRecord], Awaitable[bool]]
"""Called at each step's boundary, when nothing of the step is pending. Returns whether to go on."""


Stage = Callable[[str], AbstractContextManager[None]]
"""Measures what is inside under the name of a stage (``StageTimes.stage``)."""


def unmeasured(name: str) -> AbstractContextManager[None]:
    """The stage of a loop whose time nobody wants to know."""
    return nullcontext()


UNSCORED = "a reward function gave no score"
"""Why a group is dropped that has no reward (``spec.reward.onError: drop``)."""


def keep_all(group: Group) -> str | None:
    """The filter of a job without one."""
    return None


class Pipeline:
    """Runs the loop until ``after_step`` says stop or the feed is exhausted.

    Usage::

        pipeline = Pipeline(feed, rollout, trainer, schedule, after_step=observe)
        await pipeline.run(first_step=restored_step + 1)
    """

    def __init__(
        self,
        feed: Feed,
        rollout: Rollout,
        trainer: Trainer,
        schedule: Schedule,
        *,
        after_step: AfterStep,
        keep: Keep = keep_all,
        stage: Stage = unmeasured,
        waits: Waits | None = None,
        journal: Journal | None = None,
        restored: Sequence[Prompt] = (),
        most_dropped: int = 10_000,
        sample_deadline_seconds: float = 3600.0,
    ) -> None:
        """``most_dropped``: groups that ``keep`` may drop before a batch is full; a filter that keeps nothing must end
        in an error, not in an endless run. ``restored``: prompts that an earlier process left open, which the
        schedule knows already; they run first."""
        self.feed = feed
        self.rollout = rollout
        self.trainer = trainer
        self.schedule = schedule
        self._after_step = after_step
        self._keep = keep
        self._stage = stage
        self._waits = waits or Waits()
        self._journal = journal or NoJournal()
        self._restored = tuple(restored)
        self._deadline_seconds = sample_deadline_seconds
        self._groups: dict[int, Group] = {}
        self._open: dict[int, Prompt] = {}
        self._changed = asyncio.Event()
        schedule.tells(self._changed.set)
        self._exhausted = False
        self._most_dropped = most_dropped
        self._dropped_since_batch = 0
        self._dropped_lately = Tally()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._reading = 0
        """How many groups were dropped and wait for prompts in their place to be read."""
        self._ended: set[int] = set()
        """Open groups that were told to end, because they were late."""
        self._late = 0
        self._failed: Exception | None = None
        """The first error of any part."""

    @property
    def open_prompts(self) -> list[Prompt]:
        """Prompts that were taken from the feed and are neither trained nor dropped; a resumed run continues them."""
        return list(self._open.values())

    @property
    def finished_groups(self) -> list[Group]:
        """Groups that are generated and scored, and wait for the trainer."""
        return list(self._groups.values())

    def take_dropped(self) -> Tally:
        """Groups dropped since the last call."""
        dropped, self._dropped_lately = self._dropped_lately, Tally()
        return dropped

    def take_late(self) -> int:
        """Groups that were ended or dropped since the last call because a batch waited for them alone."""
        late, self._late = self._late, 0
        return late

    async def run(self, first_step: int = 1) -> None:
        """Raises the first error of any part, with everything else cancelled."""
        step = first_step
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                with self._noting_failure():
                    # All that may start at first starts together.
                    await self._prompts_at_hand()
                    for prompt in self._restored:
                        self._start(prompt)
                    while await self._run_step(step):
                        step += 1
                for running in list(self._running.values()):
                    running.cancel()
        except ExceptionGroup:
            # Raised below, not here: the group would take the place of what the error was raised from.
            assert self._failed is not None
        finally:
            self._tasks = None
        if self._failed is not None:
            raise _first_cause(self._failed)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """For each part of the loop. A task group bundles errors in the order in which its tasks ended, the trainer's
        side last: what groups raise while they are cancelled would be told in the place of what ended the run."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error
            raise

    # --- the trainer's side

    async def _run_step(self, step: int) -> bool:
        """One policy version. Returns False when there is nothing (more) to train or the job is to stop."""
        pulls: list[TrainedBatch] = []
        trained: list[Group] = []
        while not self.schedule.publication_due:
            await self._prompts_at_hand()
            self._admit()
            with self._stage("generate"):
                batch = await self._next_batch()
            if not batch:
                break
            groups = [self._groups[ordinal] for ordinal in batch]
            pulls.append(await self.trainer.train(groups, step=step, version=self.schedule.version))
            self._dropped_since_batch = 0
            self.schedule.trained(batch)
            self._journal.trained(groups, step, self.schedule.version)
            for ordinal in batch:  # not before: a step that is given up leaves its groups to the next attempt
                del self._open[ordinal], self._groups[ordinal]
            self._ended.difference_update(batch)
            trained.extend(groups)
        if not trained:
            return False
        with self._stage("publish"):
            publication = await self.trainer.publish(self.schedule.version + 1)
        record = StepRecord(
            step=step,
            version=self.schedule.published(),
            groups=trained,
            metrics={**merge_pulls([pull.metrics for pull in pulls]), **publication},
            apart=apart_in_all([pull.apart for pull in pulls if pull.apart is not None]),
        )
        return await self._after_step(record) and not (self._exhausted and self.schedule.open == 0)

    def _samples(self) -> str:
        """What the trainer's side waits for between two batches."""
        samples = self.rollout.waiting_for(*self.schedule.awaited(last=self._exhausted))
        late = self.schedule.late(last=self._exhausted) if self.schedule.settings.on_deadline == "wait" else []
        if late:
            groups = "1 late group holds" if len(late) == 1 else f"{len(late)} late groups hold"
            samples += f"; only {groups} up the batch (pipeline.staleness.onDeadline: wait)"
        return f"prompts to be read; {samples}" if self._reading else samples

    def _finished_at(self) -> float:
        return self.rollout.finished_at

    async def _next_batch(self) -> list[int] | None:
        began, seconds = asyncio.get_running_loop().time(), self._deadline_seconds
        with self._waits.wait("trainer", self._samples, seconds, progress=self._finished_at) as wait:
            try:
                while True:
                    self._changed.clear()
                    batch = self.schedule.choose(last=self._exhausted)
                    if batch is not None or (self._exhausted and self.schedule.open == 0):
                        return batch
                    if self.schedule.settings.on_deadline != "wait" and await self._end_late():
                        continue
                    await patiently(self._changed, lambda: max(began, self._finished_at()) + seconds)
            except TimeoutError:
                if self._reading:
                    raise _not_read(seconds) from None
                raise DeadlineError(
                    f"{wait.sentence}. No sample was finished within {seconds:.0f} s (deadlines.progressSeconds). "
                    "If samples take that long, raise it or shorten rollout.maxResponseTokens; otherwise, check the "
                    "log of the named engine to see where it hangs."
                ) from None

    async def _end_late(self) -> bool:
        """Ends or drops the groups for which alone the next batch waits; returns whether that has changed anything that
        a batch is chosen by."""
        late = [ordinal for ordinal in self.schedule.late(last=self._exhausted) if ordinal not in self._ended]
        self._late += len(late)
        if late and self.schedule.settings.on_deadline == "end":
            self._ended.update(late)
            late = await self.rollout.end(late)
        # Some may have finished meanwhile.
        late = [ordinal for ordinal in late if ordinal in self._running and ordinal not in self._groups]
        for ordinal in late:
            self._running.pop(ordinal).cancel()
            self._drop(Group(self._open[ordinal]), "deadline")
        if late:
            await self._prompts_at_hand()
            self._admit()
        return bool(late)

    def _drop(self, group: Group, reason: str) -> None:
        ordinal = group.prompt.ordinal
        self._dropped_lately.add(len(group.episodes), group.response_tokens, group.mean_score)
        self.schedule.dropped(ordinal)
        self._journal.dropped(group, reason)
        self._ended.discard(ordinal)
        del self._open[ordinal]

    # --- the rollout's side

    async def _prompts_at_hand(self) -> None:
        """Waits until as many prompts as may start are read; how many that are may change meanwhile."""
        await self.read(self._prepare())

    async def read(self, reading: Awaitable[T]) -> T:
        """What ``reading`` returns, which waits for the storage of the data. Raises ``DeadlineError``."""
        seconds = self._deadline_seconds
        with self._waits.wait("trainer", "prompts to be read", seconds):
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await reading
            except TimeoutError:
                if not limit.expired():
                    raise
                raise _not_read(seconds) from None

    async def _prepare(self) -> None:
        while not self._exhausted:
            if await self.feed.prepare(self.schedule.admissible(self.rollout.serving_version)):
                return

    def _admit(self) -> None:
        """Starts the prompts that may start, which are at hand: in one go, so that they enter the engines together."""
        if self._exhausted:
            return
        version = self.rollout.serving_version
        for _ in range(self.schedule.admissible(version)):
            prompt = self.feed.next()
            if prompt is None:
                self._exhausted = True
                self._changed.set()
                return
            self.schedule.admitted(prompt.ordinal, version)
            self._start(prompt)

    def _start(self, prompt: Prompt) -> None:
        ordinal = prompt.ordinal
        self._journal.admitted(prompt, self.rollout.serving_version, self.schedule.deadline(ordinal))
        self._open[ordinal] = prompt
        assert self._tasks is not None
        self._running[ordinal] = self._tasks.create_task(self._run_group(prompt))

    async def _run_group(self, prompt: Prompt) -> None:
        with self._noting_failure():
            await self._make_group(prompt)

    async def _make_group(self, prompt: Prompt) -> None:
        unscored: UnscoredError | None = None
        reason: str | None
        try:
            group = await self.rollout.run(prompt)
            reason = self._keep(group)
        except UnscoredError as error:
            group, reason, unscored = Group(prompt), UNSCORED, error
        if reason is None:
            self._groups[prompt.ordinal] = group
            self.schedule.finished(prompt.ordinal)
            self._journal.finished(prompt.ordinal)
        else:
            self._dropped_since_batch += 1
            if self._dropped_since_batch >= self._most_dropped:
                raise _none_left(self._dropped_since_batch, reason, unscored)
            self._drop(group, reason)
            self._reading += 1  # a deadline in the meantime is the trainer's, who waits for a batch
            await self._prepare()
            self._reading -= 1
            self._admit()
        del self._running[prompt.ordinal]
        self._changed.set()


def merge_pulls(pulls: list[dict[str, float]]) -> dict[str, float]:
    """One step's metrics from those of its pulls, each reduced as the catalogue says."""
    if len(pulls) == 1:
        return pulls[0]
    merged: dict[str, float] = {}
    for name in {name: None for pull in pulls for name in pull}:
        values = [pull[name] for pull in pulls if name in pull]
        match check(name).reduction:
            case "sum":
                merged[name] = sum(values)
            case "max":
                merged[name] = max(values)
            case "min":
                merged[name] = min(values)
            case "slowest":
                merged[name] = max(pulls, key=lambda pull: _slowest_seconds(pull, name))[name]
            case "last":
                merged[name] = values[-1]
            case "mean" | "batch":
                merged[name] = sum(values) / len(values)
    return merged


def _slowest_seconds(pull: Mapping[str, float], name: str) -> float:
    """How long the sample took that a pull's metric is of; below all others where the pull has no such metric."""
    if name not in pull:
        return -1.0
    family = name.rpartition("/")[0]
    times = ("seconds", "generate_sequences", "tool_calls")
    return sum(pull.get(f"{family}/{time}", 0.0) for time in times)


def apart_in_all(pulls: Sequence[Apart]) -> Apart | None:
    """The mean figures of a step's batches; of those with tokens of other versions alone, where there are any."""
    judged = [apart for apart in pulls if apart.family == "drift"] or list(pulls)
    if not judged:
        return None
    return Apart(
        judged[0].family,
        kl=sum(apart.kl for apart in judged) / len(judged),
        chi_square=sum(apart.chi_square for apart in judged) / len(judged),
        effective_sample_size=sum(apart.effective_sample_size for apart in judged) / len(judged),
        worst=pulls[-1].worst,
    )


def _none_left(dropped: int, reason: str, unscored: UnscoredError | None) -> RLJobError:
    """What is said when groups are dropped one after the other; ``unscored``: why the last of them was."""
    told = f"{dropped} prompt groups were dropped before a batch was full"
    if unscored is not None:
        return UnscoredError(f"{told}, the last one because it has no reward. {unscored}", unscored.exit_code)
    return DataError(
        f"{told} ({reason}). The reward hardly distinguishes samples: look at the generations in the output folder, "
        "disable algorithm.groupFilter, or raise its maxBatches."
    )


def _not_read(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"reading the next prompts took longer than {seconds:.0f} s (deadlines.progressSeconds). Check that the "
        "storage with spec.data.train answers, and try again"
    )


def _first_cause(error: Exception) -> Exception:
    """The first real error in the bundle of a part's own task group; its siblings were only cancelled because of it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error

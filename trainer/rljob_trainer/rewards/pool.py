"""Rewards of whole prompt groups: quick built-in rules here, functions in worker processes under a time limit, tests in
a sandbox, judges over HTTP or on the job's own engines, reward models in processes of their own.

    async with RewardPool(job.spec.reward, longest_response=512, paths=[folder_of_the_job_file]) as pool:
        group_rewards = await pool.score(group)

A function that raises, hangs, crashes its process or returns no finite number is always reported with its sample:
``onError: fail`` raises ``RewardError``; ``onError: score`` gives the sample ``errorScore`` and says so in its
``RewardResult.error``, in the log and in ``failures``; ``onError: drop`` raises ``UnscoredError``, which leaves the
group out. Where worker processes were lost twice on a sample and nothing says that the function did it, or a judge does
not answer, ``onError: fail`` raises ``RewardWorkerError``: the run may be tried again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rljob_trainer.episodes.episode import Group, RewardResult
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import digest_of
from rljob_trainer.errors import CHANGED_JOB, JobFileError, RewardError, RewardWorkerError, UnscoredError
from rljob_trainer.rewards.code_tests import DEFAULT_SECONDS, OUTPUT_BYTES
from rljob_trainer.rewards.judge import Judge
from rljob_trainer.rewards.process import WorkerProcess
from rljob_trainer.rewards.reasoning_gym import DEFAULT_SECONDS as GYM_SECONDS
from rljob_trainer.rewards.reward_model import RewardModel
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.sharing import SharedWork
from rljob_trainer.rewards.terms import (
    Outcome,
    OverlongSettings,
    Response,
    RewardFailure,
    Term,
    TermSpec,
    combine,
    term_specs,
)
from rljob_trainer.rewards.verdicts import too_large
from rljob_trainer.waits import Waits
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.chosen import chosen_sandbox

if TYPE_CHECKING:
    from rljob_api.spec.reward import Reward, RewardFunction
    from rljob_trainer.rewards.judge.transport import OwnJudge
    from rljob_trainer.rewards.reward_model.scorers import Scorers
    from rljob_trainer.world.sandbox import Prepared, Sandbox

log = logging.getLogger(__name__)

_MODELS = ("judge", "rewardModel")
"""Functions that ask another model."""
_EXCERPT = 300
"""Characters of a prompt's or response's end that a message shows."""


_REMEDY = (
    "correct the function and start again: the run continues from its last checkpoint. Or set spec.reward.onError: "
    f"score to give such samples errorScore, or to drop to skip their groups, {CHANGED_JOB}"
)
_AWAY_REMEDY = (
    "Try again when it answers. To continue without the groups that it does not score, set spec.reward.onError: drop, "
    f"{CHANGED_JOB}."
)
_LOGGED = 50
"""Failures shown in full in the log; further ones are in the samples' results and in the counts."""


@dataclass(frozen=True, slots=True)
class _Route:
    """What scores the samples of a data source."""

    specs: Sequence[TermSpec]
    inline: Sequence[Term]
    """Those that are computed here."""
    pooled: bool
    """Whether others are computed in processes."""
    sandboxed: Sequence[Term] = ()
    """Those that run programs."""
    asked: Sequence[str] = ()
    """Names of those that ask a model."""


class ScoringModel(Protocol):
    """Another model that scores, one sample at a time: a judge, a reward model."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, response: Response) -> RewardVerdict | RewardFailure: ...

    def take_counts(self) -> dict[str, float]:
        """Metrics, since the last call."""
        ...


class RewardPool:
    """Scores groups for one run. Any number of ``score`` calls may be under way at once."""

    def __init__(
        self,
        reward: Reward,
        *,
        longest_response: int,
        paths: Sequence[str | os.PathLike[str]] = (),
        records: Path | None = None,
        waits: Waits | None = None,
        scorers: Scorers | None = None,
        judge: OwnJudge | None = None,
        gym: Prepared | None = None,
    ) -> None:
        """``longest_response`` is rollout.maxResponseTokens; ``paths`` are folders with the user's modules, ``records``
        is the run's output folder, which keeps what judges were asked and said, and which reward model it is (None:
        forgotten). ``scorers``: the pool that computes reward models (None: processes beside the driver do).
        ``judge``: the engines of judges that have no endpoint (None: the job has no such judge). ``gym``: what the
        sandbox of reasoningGym imports (None: the job has no such data).

        Raises ``JobFileError`` for parameters that a built-in function does not take.
        """
        self._reward = reward
        self._specs = term_specs(reward)
        # A custom function is only ever imported by the workers: its module may do anything.
        terms = {spec.name: Term(spec) for spec in self._specs if spec.type not in ("custom", *_MODELS)}
        self._inline = [term for term in terms.values() if term.inline]
        self._sandboxed = {term.spec.name: term for term in terms.values() if term.sandboxed}
        self._sandboxes: dict[str, Sandbox] = {}
        """By the names of those that run programs: each has time limits of its own."""
        self._models: dict[str, ScoringModel] = {}
        self._base = Path(paths[0]) if paths else Path()
        self._records = records
        self._waits = waits
        self._scorers, self._judge = scorers, judge
        self._gym = gym
        self._open = AsyncExitStack()
        asked = {spec.name for spec in self._specs if spec.type in _MODELS}
        here = {term.spec.name for term in self._inline} | set(self._sandboxed) | asked
        self._pooled = [spec for spec in self._specs if spec.name not in here]
        self._hang_scores = {name: term.hang_score for name, term in terms.items() if term.hang_score is not None}
        self._overlong = (
            OverlongSettings(longest_response, reward.overlong.buffer_tokens, reward.overlong.penalty)
            if reward.overlong
            else None
        )
        self._routes: dict[str, _Route] = {}
        self._workers = [
            WorkerProcess(self._pooled, reward.timeout_seconds, [os.fspath(path) for path in paths])
            for _ in range(reward.workers if self._pooled else 0)
        ]
        self._work = SharedWork(self._workers)
        self._logged = 0
        self.failures = 0
        """Samples that got ``errorScore``, or whose group is left out, because a function failed on them."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def worker_pids(self) -> list[int]:
        """The processes now running."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Starts the workers now, so that a function that cannot be imported is found before the first sample.

        Raises ``JobFileError`` naming the function, the variable that has no key for a judge, or what is no reward
        model, and ``OutputError`` for the record of a model.
        """
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                await self.close()
                raise problem
        try:
            for name, term in self._sandboxed.items():
                of_gym = term.spec.type == "reasoningGym"
                seconds = float(term.params.get("seconds", GYM_SECONDS if of_gym else DEFAULT_SECONDS))
                sandbox = await chosen_sandbox(
                    self._reward.sandbox,
                    "spec.reward.sandbox",
                    seconds,
                    OUTPUT_BYTES,
                    self._gym if of_gym else None,
                    self._waits,
                )
                self._sandboxes[name] = await self._open.enter_async_context(sandbox)
                for what in sandbox.not_contained:
                    log.warning("The sandbox of %s is incomplete here: %s (docs/sandbox.md)", name, what)
            for spec, function in zip(self._specs, self._reward.functions, strict=True):
                if (model := self._model_of(spec, function)) is not None:
                    self._models[spec.name] = model
                    self._open.push_async_callback(model.close)
                    await model.open()
        except WorldError as error:
            await self.close()
            raise RewardWorkerError(f"cannot open a reward's sandbox: {error}") from error
        except BaseException:
            await self.close()
            raise

    def _model_of(self, spec: TermSpec, function: RewardFunction) -> ScoringModel | None:
        if function.judge is not None:
            return Judge(spec, function.judge, self._records, self._waits, self._judge)
        if function.reward_model is not None:
            return RewardModel(
                spec, function.reward_model, self._base, self._records, pool=self._scorers, waits=self._waits
            )
        return None

    async def close(self) -> None:
        """Ends all workers and sandboxes. May be called twice."""
        await self._work.close()
        await self._open.aclose()
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raises ``JobFileError`` for a data source that no function scores, and for a name that no source has."""
        sources = tuple(sources)
        for source in sources:
            self._route(source)
        for spec in self._specs:
            if unknown := sorted(spec.sources - set(sources)):
                raise JobFileError(
                    f"{spec.place}.sources: there is no data source {', '.join(map(repr, unknown))}; "
                    f"use one of {', '.join(map(repr, sources))}"
                )

    def in_processes(self, source: str) -> bool:
        """Whether a function that scores this data source runs in a worker process, runs programs, or asks a model."""
        route = self._route(source)
        return route.pooled or bool(route.sandboxed) or bool(route.asked)

    @property
    def seconds(self) -> float | None:
        """What a sample may take; None: some functions have limits of their own."""
        own = any(spec.type in ("codeTests", "reasoningGym", *_MODELS) for spec in self._specs)
        return None if own else float(self._reward.timeout_seconds)

    def take_counts(self) -> dict[str, float]:
        """Metrics of judges and reward models, since the last call."""
        return {name: value for model in self._models.values() for name, value in model.take_counts().items()}

    async def score(self, group: Group) -> list[RewardResult]:
        """One result per episode, in their order. Raises ``RewardError``, ``RewardWorkerError`` or ``UnscoredError`` as
        the job's ``onError`` says, and ``JobFileError`` when a judge refuses to answer at all."""
        prompt = group.prompt
        return await self.score_responses(
            [
                Response(
                    prompt=prompt.text,
                    response=episode.text,
                    answer=prompt.answer,
                    source=prompt.source,
                    tokens=episode.response_tokens,
                    finish=episode.finish,
                    columns=prompt.columns,
                    label=f"{episode.id} ({prompt.source}, row {prompt.row})",
                    conversation=episode.messages,
                    returned=episode.returned,
                    reference=prompt.reference,
                    data_source=prompt.data_source,
                    messages=prompt.messages,
                    conversational=prompt.conversational,
                    answers=episode.answers,
                )
                for episode in group.episodes
            ],
            [(episode.id, digest_of(episode)) for episode in group.episodes],
        )

    async def score_responses(
        self, responses: Sequence[Response], of: Sequence[tuple[EpisodeId, int]] | None = None
    ) -> list[RewardResult]:
        """Scores like ``score``, for responses that are no group; ``of`` is what results say that they are of."""
        routes = [self._route(response.source) for response in responses]
        outcomes: list[Outcome] = [
            {term.spec.name: term.score(response) for term in route.inline}
            for response, route in zip(responses, routes, strict=True)
        ]
        elsewhere = [i for i, route in enumerate(routes) if route.pooled]
        if elsewhere:
            judged = await self._work.score([responses[i] for i in elsewhere])
            for i, outcome in zip(elsewhere, judged, strict=True):
                outcomes[i] |= outcome
        await self._score_beside(responses, routes, outcomes)
        return list(map(self._result, responses, outcomes, of or itertools.repeat(None)))

    async def _score_beside(
        self, responses: Sequence[Response], routes: Sequence[_Route], outcomes: Sequence[Outcome]
    ) -> None:
        """Programs and models, all samples' at once: each takes as many as it may."""

        async def tested(term: Term, response: Response, outcome: Outcome) -> None:
            outcome[term.spec.name] = await term.score_in(self._sandboxes[term.spec.name], response)

        async def judged(name: str, response: Response, outcome: Outcome) -> None:
            outcome[name] = await self._models[name].score(response)

        tasks = []
        for response, route, outcome in zip(responses, routes, outcomes, strict=True):
            for term in route.sandboxed:
                tasks.append(asyncio.create_task(tested(term, response, outcome), name="code tests"))
            for name in route.asked:
                tasks.append(asyncio.create_task(judged(name, response, outcome), name="judged sample"))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _result(self, response: Response, outcome: Outcome, of: tuple[EpisodeId, int] | None = None) -> RewardResult:
        """The sample's reward, or the job's answer to a function that failed on it."""
        specs = self._route(response.source).specs
        failures = [verdict for verdict in outcome.values() if isinstance(verdict, RewardFailure)]
        if not any(outcome.values()):
            failures = [
                RewardFailure(spec.name, "it returned None, and no other function scores the sample") for spec in specs
            ]
        if not failures:
            result = combine(specs, outcome, response.tokens, self._overlong, of)
            if (problem := too_large(result)) is None:
                return result
            titles = " + ".join(f"{spec.weight:g} x {spec.title}" for spec in specs)
            return self._failed(
                result, f"reward {titles} on {response.label or 'a sample'}: {problem}\n{_shown(response)}"
            )
        message = "\n".join(self._message(failure, response) for failure in failures)
        wrong = {f.term: RewardVerdict(self._hang_scores[f.term], None, False) for f in failures if self._is_wrong(f)}
        blamed = [failure for failure in failures if failure.term not in wrong]
        judged = outcome | wrong | {failure.term: RewardVerdict(self._reward.error_score) for failure in blamed}
        result = combine(specs, judged, response.tokens, self._overlong, of)
        if not blamed:
            self._log(f"{message}\nThis counts as wrong.")
            return replace(result, error=message)
        return self._failed(result, message, blamed)

    def _is_wrong(self, failure: RewardFailure) -> bool:
        """Whether a failure of a function only says that the response is wrong."""
        return failure.hung and failure.term in self._hang_scores

    def _failed(self, result: RewardResult, message: str, blamed: Sequence[RewardFailure] = ()) -> RewardResult:
        """What ``onError`` makes of a sample without a score, because of the functions that are ``blamed``."""
        if self._reward.on_error == "fail":
            if any(failure.away for failure in blamed):
                raise RewardWorkerError(f"{message}\n{_AWAY_REMEDY}")
            if blamed and all(failure.lost for failure in blamed):
                raise RewardWorkerError(
                    f"{message}\nTry again, with more memory if it may have run out. If it is always this sample, "
                    f"{_REMEDY}. Fewer spec.reward.workers need less memory."
                )
            raise RewardError(f"{message}\nTo continue, {_REMEDY}.")
        self.failures += 1
        if self._reward.on_error == "drop":
            self._log(f"{message}\nIts group is dropped (spec.reward.onError: drop).")
            nobodys = bool(blamed) and all(failure.away or failure.lost for failure in blamed)
            kind = RewardWorkerError if nobodys else RewardError
            raise UnscoredError(f"{message}\nTo continue, {_REMEDY}.", kind.exit_code)
        substitute = self._reward.error_score
        self._log(f"{message}\nThe sample gets spec.reward.errorScore = {substitute:g}.")
        return replace(result, score=substitute, turns=(), error=message)

    def _log(self, message: str) -> None:
        if self._logged < _LOGGED:
            log.warning("%s", message)
        elif self._logged == _LOGGED:
            log.warning("Reward functions failed on more than %d samples; further ones are only counted.", _LOGGED)
        self._logged += 1

    def _message(self, failure: RewardFailure, response: Response) -> str:
        spec = next(spec for spec in self._specs if spec.name == failure.term)
        where = f"reward function {spec.title} failed on {response.label or 'a sample'}"
        return f"{where}: {failure.problem}\n{_shown(response)}"

    def _route(self, source: str) -> _Route:
        if source not in self._routes:
            specs = [spec for spec in self._specs if spec.applies_to(source)]
            if not specs:
                raise JobFileError(
                    f"spec.reward.functions: none applies to the data source {source!r}; add it to the sources of one"
                )
            inline = [term for term in self._inline if term.applies_to(source)]
            pooled = any(spec.applies_to(source) for spec in self._pooled)
            programs = [term for term in self._sandboxed.values() if term.applies_to(source)]
            asked = [spec.name for spec in specs if spec.type in _MODELS]
            self._routes[source] = _Route(specs, inline, pooled, programs, asked)
        return self._routes[source]


def _shown(response: Response) -> str:
    return (
        f"  prompt:   {_excerpt(response.prompt)}\n"
        f"  response: {_excerpt(response.response)}\n"
        f"  answer:   {_excerpt(response.answer)}"
    )


def _excerpt(text: str | None) -> str:
    """The end of a text, where answers stand, on one line."""
    if text is None:
        return "none"
    return repr(text) if len(text) <= _EXCERPT else "..." + repr(text[-_EXCERPT:])

"""A reward that another model gives: questions, tries, limits, what is remembered, what is waited for.

A judge that fails, is busy or away is asked again, later each time, until the question's deadline; meanwhile the wait
is known by name. What it says is read strictly, and what cannot be read is asked again. Nothing of this ever becomes a
score: it is a ``RewardFailure``, which ``RewardPool`` handles as the job's ``onError`` says.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.judge.endpoint import JudgeEndpoint
from rljob_trainer.rewards.judge.limits import MinuteLimits, TokenBudget
from rljob_trainer.rewards.judge.question import Question, question_of
from rljob_trainer.rewards.judge.reading import NoScoreError, check_pattern, score_in
from rljob_trainer.rewards.judge.record import JudgeRecord
from rljob_trainer.rewards.judge.transport import (
    AwayError,
    JudgeAnswer,
    JudgeRefusedError,
    JudgeTransport,
    OwnJudge,
    QuestionError,
    QuestionLostError,
)
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import RewardFailure
from rljob_trainer.rewards.verdicts import described_error
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.names import metric
from rljob_trainer.waits import Clock, Waits

if TYPE_CHECKING:
    from rljob_api.spec.judge import JudgeSpec
    from rljob_trainer.rewards.terms import Response, TermSpec

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try of a question, doubled with each further one."""
_LEAST_SECONDS = 0.25
"""Of a try: with less until the deadline there is none."""


class _Counts:
    """What happened since it was made."""

    def __init__(self) -> None:
        self.requests = self.retries = self.unreadable = self.remembered = self.failures = 0
        self.answers = self.tokens = 0
        self.seconds = self.slowest = 0.0

    def request(self) -> None:
        self.requests += 1

    def retry(self) -> None:
        self.retries += 1

    def unread(self) -> None:
        self.unreadable += 1

    def known(self) -> None:
        self.remembered += 1

    def failure(self) -> None:
        self.failures += 1

    def answer(self, tokens: int, seconds: float) -> None:
        self.answers += 1
        self.tokens += tokens
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)


class _Asking:
    """A question under way, for as many samples as ask it."""

    def __init__(self, task: asyncio.Task[float | RewardFailure]) -> None:
        self.task = task
        self._samples = 0

    def join(self) -> None:
        self._samples += 1

    def leave(self) -> bool:
        """Whether nobody asks it any more."""
        self._samples -= 1
        return not self._samples


@dataclass(frozen=True, slots=True)
class _Away:
    """What a question met that is asked again."""

    problem: str
    tries: int
    deadline: Clock


class Judge:
    """Scores for one term of the reward; used by one event loop, open from ``open`` to ``close``."""

    def __init__(
        self,
        spec: TermSpec,
        judge: JudgeSpec,
        output: Path | None,
        waits: Waits | None = None,
        own: OwnJudge | None = None,
    ) -> None:
        """``output`` is the run's folder; None: what was asked is forgotten at the end. ``own``: the job's own engines,
        for a judge without an endpoint. Raises ``JobFileError`` when the environment has no key, or the pattern cannot
        be read."""
        self.spec = spec
        self._judge = judge
        check_pattern(judge.parser, spec.place)
        self._transport: JudgeTransport
        if judge.base_url is not None:
            self._transport = JudgeEndpoint(judge, spec.place)
        else:
            assert own is not None, "a judge without an endpoint is refused in a job without spec.judge"
            self._transport = own.asked_by(spec.name, float(judge.request_seconds))
        folder = None if output is None else output / run_folder.JUDGES
        self._record = JudgeRecord(spec.name, folder, remembers=judge.cache)
        self._waits = waits or Waits()
        self._limits = MinuteLimits(judge.requests_per_minute, judge.tokens_per_minute)
        self._budget = TokenBudget(judge.most_tokens, lambda: self._record.tokens)
        self._slots = asyncio.Semaphore(judge.concurrency or self._transport.concurrency)
        self._asking: dict[str, _Asking] = {}
        self._away: dict[int, _Away] = {}
        """Questions that are asked again."""
        self._waiting = ExitStack()
        self._has_answered = False
        self._counts = _Counts()
        self._asked = 0
        """How often a question was taken up, which tells those under way apart."""
        self._random = random.Random()

    async def open(self) -> None:
        """Reads the record, and waits for the first of the job's own engines; an endpoint that is away at the start may
        be there when there is something to ask. Raises ``OutputError``, and what the transport raises; may take
        long."""
        await asyncio.to_thread(self._record.open)
        await self._transport.open()

    async def close(self) -> None:
        for asking in list(self._asking.values()):
            asking.task.cancel()
        await asyncio.gather(*(asking.task for asking in self._asking.values()), return_exceptions=True)
        await self._transport.close()
        self._waiting.close()
        self._record.close()

    async def score(self, response: Response) -> RewardVerdict | RewardFailure:
        """The judge's score, or why there is none. Raises ``JobFileError`` when the endpoint refuses the first
        questions, and ``OutputError`` when the record cannot be written."""
        try:
            question = question_of(self._judge, self._transport.model, response)
        except ValueError as problem:
            return RewardFailure(self.spec.name, described_error(problem))
        if self._judge.cache and (known := self._record.score(question.key)) is not None:
            self._counts.known()
            return RewardVerdict(known)
        said = await (self._shared(question) if self._judge.cache else self._ask(question))
        if isinstance(said, RewardFailure):
            self._counts.failure()
            return said
        return RewardVerdict(said)

    def take_counts(self) -> dict[str, float]:
        """Metrics, since the last call."""
        counts, self._counts = self._counts, _Counts()
        part = self.spec.name
        told = {
            metric("judge/<part>/requests", part=part): float(counts.requests),
            metric("judge/<part>/retries", part=part): float(counts.retries),
            metric("judge/<part>/unreadable", part=part): float(counts.unreadable),
            metric("judge/<part>/remembered", part=part): float(counts.remembered),
            metric("judge/<part>/failures", part=part): float(counts.failures),
            metric("judge/<part>/tokens", part=part): float(counts.tokens),
            metric("judge/<part>/requests_of_run", part=part): float(self._record.requests),
            metric("judge/<part>/tokens_of_run", part=part): float(self._record.tokens),
        }
        if counts.answers:
            told[metric("judge/<part>/seconds/mean", part=part)] = counts.seconds / counts.answers
            told[metric("judge/<part>/seconds/max", part=part)] = counts.slowest
        return told | self._transport.take_counts()

    async def _shared(self, question: Question) -> float | RewardFailure:
        """Equal questions at the same time are asked once. The last sample that gives up ends the asking."""
        asking = self._asking.get(question.key)
        if asking is None:
            asking = _Asking(asyncio.create_task(self._ask(question), name="judge"))
            self._asking[question.key] = asking
        else:
            self._counts.known()
        asking.join()
        try:
            return await asyncio.shield(asking.task)
        finally:
            if asking.leave():
                asking.task.cancel()
                # At once: whoever asks next is not to be given what was called off.
                del self._asking[question.key]

    async def _ask(self, question: Question) -> float | RewardFailure:
        """Until there is a score, or an end of patience."""
        self._asked += 1
        mark = self._asked
        try:
            return await self._ask_until_the_deadline(question, mark)
        finally:
            self._is_there(mark)

    async def _ask_until_the_deadline(self, question: Question, mark: int) -> float | RewardFailure:
        tries = unread = 0
        first: float | None = None
        while True:
            async with self._slots, self._budget.held(question.tokens):
                spent = await self._limits.begin(question.tokens)
                if (used_up := self._used_up()) is not None:
                    return RewardFailure(self.spec.name, used_up)
                began = time.monotonic()
                first = began if first is None else first
                deadline = self._deadline(first)
                self._counts.request()
                self._record.asked(question.key)
                try:
                    said = await self._transport.ask(question.body, question.seed(unread), deadline)
                except QuestionError as problem:
                    return RewardFailure(self.spec.name, f"{self._name} refuses the question: {problem}")
                except QuestionLostError as problem:
                    return RewardFailure(self.spec.name, f"{self._name} does not answer: {problem}", away=True)
                except (AwayError, JudgeRefusedError) as problem:
                    self._check_refusal(problem)
                    away = problem
                else:
                    self._has_answered = True
                    tokens = question.tokens if said.tokens is None else said.tokens
                    spent.counted(tokens)
                    self._counts.answer(tokens, time.monotonic() - began)
                    self._is_there(mark)
                    try:
                        score = self._read(said)
                    except NoScoreError as problem:
                        unread += 1
                        self._counts.unread()
                        self._record.answered(question.key, None, tokens)
                        if unread >= self._judge.attempts:
                            return RewardFailure(
                                self.spec.name, f"{self._name} was asked {_times(unread)} but gave no score: {problem}"
                            )
                        continue
                    self._record.answered(question.key, score, tokens)
                    return score
            tries += 1
            self._counts.retry()
            pause = self._pause(tries, away, deadline())
            if pause is None:
                return RewardFailure(
                    self.spec.name,
                    f"{self._name} has not answered within {self._judge.deadline_seconds} s (deadlineSeconds), tried "
                    f"{_times(tries)}: {away}",
                    away=True,
                )
            self._is_away(mark, _Away(str(away), tries, deadline))
            await asyncio.sleep(pause)

    def _deadline(self, first: float) -> Clock:
        """The deadline of a question that began to be asked at ``first``: what waits behind others is not late as long
        as those are answered."""
        return lambda: max(first, self._transport.answered_at) + self._judge.deadline_seconds

    @property
    def _name(self) -> str:
        return self._transport.name

    def _read(self, said: JudgeAnswer) -> float:
        if said.cut:
            raise NoScoreError(f"it was cut off at maxTokens = {self._judge.max_tokens}; raise it")
        return score_in(said.text, self._judge.parser)

    def _used_up(self) -> str | None:
        """Which budget of the run is used up, if any."""
        for name, most, spent in (
            ("mostRequests", self._judge.most_requests, self._record.requests),
            ("mostTokens", self._judge.most_tokens, self._record.tokens),
        ):
            if most is not None and spent >= most:
                return f"the budget of {self._name} is used up: {name} = {most}, {spent} spent"
        return None

    def _check_refusal(self, problem: AwayError | JudgeRefusedError) -> None:
        """A refusal is a mistake in the job as long as nothing was ever answered; later it is a gateway's bad day."""
        if isinstance(problem, JudgeRefusedError) and not self._has_answered:
            raise JobFileError(
                f"{self.spec.place}.judge: {self._name} refuses to answer: {problem}. Correct baseUrl, model or the key"
            )

    def _pause(self, tries: int, problem: AwayError | JudgeRefusedError, deadline: float) -> float | None:
        """Seconds until the next try; None: it is too late for one."""
        left = deadline - time.monotonic()
        wanted = (problem.seconds if isinstance(problem, AwayError) else None) or 0.0
        if left < _LEAST_SECONDS or wanted >= left:
            return None
        # What one question is told holds for all of them.
        self._limits.hold(wanted)
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries - 1, 10))
        # Not all at once; half of what is left is for the try itself.
        return max(wanted, min(longest * self._random.uniform(0.5, 1.0), left / 2))

    def _is_away(self, mark: int, away: _Away) -> None:
        if not self._away:
            self._waiting.enter_context(
                self._waits.wait(
                    f"reward {self.spec.name}",
                    self._reason,
                    until=lambda: min(away.deadline() for away in self._away.values()),
                )
            )
        self._away[mark] = away

    def _is_there(self, mark: int) -> None:
        if self._away.pop(mark, None) is not None and not self._away:
            self._waiting.close()

    def _reason(self) -> str:
        latest = max(self._away.values(), key=lambda away: away.tries)
        questions = "1 question waiting" if len(self._away) == 1 else f"{len(self._away)} questions waiting"
        return f"{self._name}, tried {_times(latest.tries)} ({latest.problem}); {questions}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"

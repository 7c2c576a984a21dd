"""The job's own judge: a pool of engines whose weights never change, asked without HTTP.

It is a ``RolloutPool`` to which nothing is published, with an ``EngineCount`` that starts its first engines, those in
place of lost ones, and those that are wanted later. What an engine had in hand when it was lost is asked again on
another one; while none is there questions wait, and whoever asks says for how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rljob_trainer.aside import aside
from rljob_trainer.data.chat import ChatTemplate
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import DeadlineError, EngineError, JobFileError, RewardWorkerError
from rljob_trainer.models.fixed import FixedModel, fixed_model
from rljob_trainer.models.folder import read_folder
from rljob_trainer.models.tokenizer import load_tokenizer
from rljob_trainer.pools.engine_count import EngineCount
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.rewards.judge.transport import AwayError, JudgeAnswer, QuestionError, QuestionLostError
from rljob_trainer.rewards.standing import GoneScorer, ReplicaState, ScorerStanding
from rljob_trainer.rewards.verdicts import described_error
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.telemetry.names import metric
from rljob_trainer.waits import Clock, Waits, patiently

if TYPE_CHECKING:
    from rljob_api.spec.pools import JudgePool

log = logging.getLogger(__name__)

_TITLE = "the judge pool"
_FIELD = "spec.judge.model.source"
_REMEDY = "see the log; correct spec.judge, or give its pods more resources"
_ALL = 1 << 20
"""Questions at once: those that no engine has room for wait here."""
_LOOK_SECONDS = 0.5
_WORDS = ("abcacb", "bcabac")
"""Of a question to try a chat template with: letters alone, which no template changes."""
_UNFIT = 32
"""So many first questions none of which fits: the context is too short for the job."""
_TRIES = 3
"""Engines that a question is given to; when all of them are lost it is asked no more."""


@dataclass(frozen=True, slots=True)
class ServedJudge:
    """The model that judges."""

    files: FixedModel
    chat: ChatTemplate
    context: int
    """Longest question and answer together, tokens."""
    stop_token_ids: tuple[int, ...]
    form: str
    """A digest of what gives its questions their form, beside its files: a chat template of the job's, and the date in
    messages. Empty: there is neither."""
    merges: bool
    """Whether the system's message is put before the user's in one."""


def served_judge(pool: JudgePool, base: Path, now: datetime | None = None) -> ServedJudge:
    """Reads it. ``base``: where a relative path starts. ``now``: the date in messages that have one (None: the present
    one). Raises ``JobFileError`` for what is no such model, and for a chat template that renders no question."""
    model = pool.model
    files = fixed_model(_FIELD, model.source, model.revision, base)
    folder = read_folder(files.folder(), field=_FIELD)
    if pool.engine == "torch" and folder.unsupported is not None:
        raise JobFileError(
            f"spec.judge.engine: the torch engine {folder.unsupported}, see {folder.path}; use engine: vllm"
        )
    wanted = pool.max_context_tokens
    if wanted is not None and wanted > folder.context_length:
        raise JobFileError(
            f"spec.judge.maxContextTokens: {wanted} is more than the model's context of {folder.context_length} "
            "tokens; lower it"
        )
    tokenizer = load_tokenizer(folder.path)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    chat = ChatTemplate(tokenizer, folder.eos_token_ids, now)
    merges = _merges(chat, _FIELD if model.chat_template is None else "spec.judge.model.chatTemplate")
    given = [part for part in (model.chat_template, chat.date) if part is not None]
    form = hashlib.sha256("\0".join(given).encode()).hexdigest()[:12] if given else ""
    return ServedJudge(files, chat, wanted or folder.context_length, folder.eos_token_ids, form, merges)


class _OpenQuestion:
    """A question that an engine is to answer."""

    def __init__(self, task: asyncio.Task[list[GenerationResult]], due: Clock) -> None:
        self.task = task
        self.due = due
        """When this try of it has failed, as things stand."""
        self.losses = 0
        """Engines that were lost with it in hand."""

    def lost(self) -> None:
        """One more. With the last it is called off at once, before the next engine is given it."""
        self.losses += 1
        if self.is_given_up:
            self.task.cancel()

    @property
    def is_given_up(self) -> bool:
        return self.losses >= _TRIES


@dataclass(frozen=True, slots=True)
class EngineSupply:
    """How engines are had."""

    load: Callable[[], ServedJudge]
    """Reads the model, which may take long."""
    start: Callable[[str, ServedJudge], Awaitable[EngineHandle]]
    """Starts one of a name. Raises ``EngineError`` and ``DeadlineError``."""
    in_hand: int
    """Questions that one engine is given at once."""
    patience_seconds: float
    """How long the first one may take to come up."""


class JudgeEngines:
    """Keeps ``wanted`` engines. Open from ``open``, which may be called several times, to ``close``."""

    def __init__(self, count: int, supply: EngineSupply, waits: Waits | None = None) -> None:
        self._supply = supply
        self._waits = waits or Waits()
        self._pool = RolloutPool(max_outstanding=supply.in_hand, made_again=self._made_again, lasting=True)
        self._count = EngineCount(
            self._pool, 0, start=self._start, bring_up=self._bring_up, between=_at_any_time, prefix="judge-"
        )
        self._count.want(count)
        self._served: ServedJudge | None = None
        self._opening = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._numbers: dict[str, int] = {}
        self._losses: dict[str, int] = {}
        self._questions: dict[EpisodeId, _OpenQuestion] = {}
        self._telling = ExitStack()

    # --- what is asked

    def asked_by(self, part: str, seconds: float) -> JudgeAsker:
        """The way for one term of the reward. ``seconds``: the longest in which no question is answered."""
        return JudgeAsker(self, part, seconds)

    async def open(self) -> ServedJudge:
        """Returns when the first engine answers. Raises ``JobFileError`` for what is no such model, and
        ``RewardWorkerError`` when no engine comes up."""
        async with self._opening:
            if self._served is None:
                self._served = await aside(self._supply.load)
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._count.run(), name="judge pool")
            patience = self._supply.patience_seconds
            deadline = asyncio.get_running_loop().time() + patience
            with self._waits.wait(_TITLE, self._reason, patience):
                while not self._pool.serving:
                    if asyncio.get_running_loop().time() >= deadline:
                        known = self._count.problem or self._count.loss
                        why = f": {known}" if known else f" within {patience:.0f} s"
                        raise RewardWorkerError(f"no engine of the judge starts{why}; {_REMEDY}")
                    await asyncio.sleep(_LOOK_SECONDS)
            return self._served

    async def answer(
        self,
        part: str,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        seed: int,
        *,
        seconds: float,
        deadline: Clock,
    ) -> GenerationResult:
        """What some engine says. Raises ``AwayError`` when none has answered anything for so many ``seconds``, or until
        the ``deadline``, ``QuestionLostError`` when too many were lost with it, and ``QuestionError`` for what does not
        fit the context."""
        number = self._numbers[part] = self._numbers.get(part, 0) + 1
        request = GenerationRequest(EpisodeId(_purpose(part), number, 0), tuple(prompt_ids), sampling, seed)
        loop = asyncio.get_running_loop()
        began, answered = loop.time(), asyncio.Event()
        task = asyncio.create_task(self._pool.generate([request]), name="judge question")
        task.add_done_callback(lambda _: answered.set())
        question = _OpenQuestion(task, lambda: min(max(began, self._pool.finished_at) + seconds, deadline()))
        try:
            with self._told(request.id, question):
                await patiently(answered, question.due)
            if question.is_given_up:
                raise QuestionLostError(
                    f"{_TRIES} engines were lost while answering it, the last one because: "
                    f"{self._pool.losses[-1].reason}"
                )
            (result,) = task.result()
            return result
        except TimeoutError:
            quiet = loop.time() - max(began, self._pool.finished_at)
            raise AwayError(f"{self._reason()}; no answer for {quiet:.1f} s") from None
        except ValueError as error:
            raise QuestionError(described_error(error)) from error
        except (EngineError, DeadlineError) as error:
            raise AwayError(str(error)) from error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def answered_at(self) -> float:
        """When it last answered a question, in the time of the event loop."""
        return self._pool.finished_at

    def take_losses(self, part: str) -> int:
        """Questions of a term that were asked again because their engine was lost, since the last call."""
        return self._losses.pop(_purpose(part), 0)

    # --- how many there are (``ScoringPool``)

    @property
    def wanted(self) -> int:
        return self._count.wanted

    def want(self, count: int) -> None:
        self._count.want(count)

    @property
    def waiting(self) -> int:
        return self._pool.queued

    @property
    def drained(self) -> Sequence[GoneScorer]:
        return [GoneScorer(gone.name, gone.place.pod) for gone in self._count.drained if gone.place is not None]

    def standings(self) -> Sequence[ScorerStanding]:
        states: dict[str, ReplicaState] = {"joining": "starting", "leaving": "leaving"}
        told = [
            ScorerStanding(
                known.name,
                None if known.place is None else known.place.pod,
                states.get(known.state, "serving"),
                known.running,
                known.oldest_seconds,
            )
            for known in self._pool.standings()
        ]
        here = {standing.name for standing in told}
        return told + [
            ScorerStanding(name, None, "starting", 0, 0.0) for name in self._count.starting if name not in here
        ]

    async def close(self) -> None:
        """Ends all engines. May be called twice."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._pool.close()

    # --- engines

    async def _start(self, name: str) -> EngineHandle:
        assert self._served is not None
        return await self._supply.start(name, self._served)

    async def _bring_up(self, handle: EngineHandle) -> None:
        """It has its weights already."""
        self._pool.activate([handle.name])

    def _made_again(self, ids: Sequence[EpisodeId]) -> None:
        for id in ids:
            self._losses[id.purpose] = self._losses.get(id.purpose, 0) + 1
            if (question := self._questions.get(id)) is not None:
                question.lost()

    # --- what is said

    @contextlib.contextmanager
    def _told(self, id: EpisodeId, question: _OpenQuestion) -> Iterator[None]:
        """Inside, a question is under way."""
        if not self._questions:
            self._telling.enter_context(self._waits.wait(_TITLE, self._reason, until=self._due))
        self._questions[id] = question
        try:
            yield
        finally:
            del self._questions[id]
            if not self._questions:
                self._telling.close()

    def _due(self) -> float | None:
        """When the first try of those under way has failed, as things stand."""
        return min((question.due() for question in self._questions.values()), default=None)

    def _reason(self) -> str:
        standings = [standing for standing in self.standings() if standing.state == "serving"]
        said = f"{len(standings)} of {self.wanted} engines" if standings else f"engines: 0 of {self.wanted} are up"
        parts = [said]
        if running := sum(standing.running for standing in standings):
            oldest = max(standing.seconds for standing in standings)
            parts[0] += f" to answer {running} questions, oldest {oldest:.1f} s"
        if self.waiting:
            parts.append(f"{self.waiting} more in the queue")
        if not standings and self._count.problem is not None:
            parts.append(f"the last one failed to start: {self._count.problem}")
        elif self._count.loss is not None:
            parts.append(self._count.loss)
        return "; ".join(parts)


class JudgeAsker:
    """A ``JudgeTransport``: requests in OpenAI's form to the job's own engines, as tokens."""

    concurrency = _ALL

    def __init__(self, engines: JudgeEngines, part: str, seconds: float) -> None:
        self._engines, self._part, self._seconds = engines, part, seconds
        self._served: ServedJudge | None = None
        self._has_fitted = False
        self._unfit = 0
        """First questions that do not fit the context."""
        self.name, self.model = "the judge of spec.judge", ""

    async def open(self) -> None:
        self._served = await self._engines.open()
        files = self._served.files
        self.name = f"the judge {files.source} of spec.judge"
        self.model = " ".join(filter(None, (files.version, self._served.form)))

    async def close(self) -> None:
        """The engines are others' to close."""

    @property
    def answered_at(self) -> float:
        return self._engines.answered_at

    async def ask(self, body: Mapping[str, Any], seed: int, deadline: Clock) -> JudgeAnswer:
        assert self._served is not None
        sampling = SamplingSettings(
            temperature=body["temperature"], max_tokens=body["max_tokens"], stop_token_ids=self._served.stop_token_ids
        )
        prompt = await asyncio.to_thread(_ids, self._served, body["messages"])
        if len(prompt) + sampling.max_tokens > self._served.context:
            self._does_not_fit(
                f"it has {len(prompt)} tokens, which with maxTokens = {sampling.max_tokens} exceed the judge's context "
                f"of {self._served.context}",
                never=sampling.max_tokens >= self._served.context,
            )
        self._has_fitted = True
        result = await self._engines.answer(
            self._part, prompt, sampling, seed, seconds=self._seconds, deadline=deadline
        )
        text = self._served.chat.decode(result.tokens.ids.tolist())
        return JudgeAnswer(text, result.finish != "stop", len(prompt) + len(result.tokens))

    def _does_not_fit(self, problem: str, *, never: bool) -> NoReturn:
        """Raises ``QuestionError``, and ``JobFileError`` when it is the job that asks for too much: no question can
        ever fit, or none of the first did."""
        self._unfit += 1
        if never or (self._unfit >= _UNFIT and not self._has_fitted):
            which = "no question can fit" if never else f"none of the first {self._unfit} questions fits"
            raise JobFileError(
                f"spec.judge.maxContextTokens: {which} (the last one: {problem}); raise it as far as the model "
                f"allows, or lower maxTokens of the judge {self._part} or rollout.maxResponseTokens"
            )
        raise QuestionError(problem)

    def take_counts(self) -> dict[str, float]:
        losses = self._engines.take_losses(self._part)
        return {metric("judge/<part>/asked_elsewhere", part=self._part): float(losses)}


def _ids(served: ServedJudge, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a question. Raises ``QuestionError`` where the template fails on it."""
    chat = served.chat
    texts = [chat.without_special(message["content"]) for message in messages]
    if not chat.is_there:
        return chat.encode("\n\n".join([*texts, ""]))
    told = [{"role": message["role"], "content": text} for message, text in zip(messages, texts, strict=True)]
    try:
        return chat.encode(chat.render(_as_one(told) if served.merges else told))
    except Exception as problem:  # a template raises what it likes
        raise QuestionError(f"the judge's chat template fails on it: {described_error(problem)}") from problem


def _as_one(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """All of it as one message of the user."""
    return [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]


def _merges(chat: ChatTemplate, field: str) -> bool:
    """Whether its template takes the system's message as part of the user's only: some raise for one (Gemma 2), others
    leave it out, and with it what says that the texts are data. Raises ``JobFileError`` for one of ``field`` that does
    not write what it is given in either way."""
    question = [{"role": "system", "content": _WORDS[0]}, {"role": "user", "content": _WORDS[1]}]
    if not chat.is_there or _wrong_with(chat, question) is None:
        return False
    if (problem := _wrong_with(chat, _as_one(question))) is not None:
        raise JobFileError(f"{field}: the chat template {problem}; correct it (spec.judge.model.chatTemplate)")
    return True


def _wrong_with(chat: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str | None:
    """Why a template cannot render ``messages``, which hold ``_WORDS``; None: it can."""
    try:
        rendered = chat.render(messages)
    except Exception as problem:  # noqa: BLE001  a template raises what it likes
        return f"cannot render a question ({described_error(problem)})"
    return None if all(word in rendered for word in _WORDS) else "drops the content of a question"


def _purpose(part: str) -> str:
    return f"the judge {part}"


def _at_any_time(who: str, what: str, seconds: float) -> AbstractAsyncContextManager[object]:
    """Nothing is ever published: an engine may leave at any time."""
    return nullcontext()

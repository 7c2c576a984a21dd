"""How a judge is asked, wherever it is: behind an OpenAI-compatible endpoint, or on the job's own engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rljob_trainer.waits import Clock


class AwayError(Exception):
    """The judge does not answer now: it is down, busy, or something else answers in its place."""

    def __init__(self, problem: str, seconds: float | None = None) -> None:
        """``seconds``: how long it wants to be left alone (Retry-After)."""
        super().__init__(problem)
        self.seconds = seconds


class JudgeRefusedError(Exception):
    """It answers that it will not: key, address or model are wrong."""


class QuestionLostError(Exception):
    """Too many engines were lost while they had it in hand: whether it was its doing is not known."""


class QuestionError(Exception):
    """It will not answer this question."""


class JudgeAnswer(NamedTuple):
    """An answer: its text, whether it was cut, and the tokens of question and answer as the judge counts them (None:
    it does not say)."""

    text: str
    cut: bool
    tokens: int | None


class JudgeTransport(Protocol):
    """The way to one judge. Open from ``open`` to ``close``."""

    @property
    def name(self) -> str:
        """The judge in messages: who, and where."""
        ...

    @property
    def model(self) -> str:
        """What answers: another model's answers are not remembered as this one's. Known once it is open."""
        ...

    @property
    def concurrency(self) -> int:
        """How many questions it is asked at once, unless the job says so itself."""
        ...

    @property
    def answered_at(self) -> float:
        """When it last answered anybody's question, in the time of the event loop, where questions wait behind one
        another: none of them is late before. ``NEVER`` where each is asked at once."""
        ...

    async def open(self) -> None:
        """Raises ``JobFileError`` and ``RewardWorkerError`` for what can never answer."""
        ...

    async def close(self) -> None: ...

    async def ask(self, body: Mapping[str, Any], seed: int, deadline: Clock) -> JudgeAnswer:
        """The answer to a request in OpenAI's form, until ``deadline``, which may move meanwhile. ``seed`` is another
        one for each try of a question, and the same when a run repeats one. Raises ``AwayError``, ``QuestionError``,
        ``JudgeRefusedError`` and ``QuestionLostError``."""
        ...

    def take_counts(self) -> dict[str, float]:
        """Metrics of its own, since the last call."""
        ...


class OwnJudge(Protocol):
    """The job's own engines, which answer for all of its judges that have no endpoint."""

    def asked_by(self, part: str, seconds: float) -> JudgeTransport:
        """For one term of the reward. ``seconds``: the longest in which no question is answered."""
        ...

"""What moves through the pipeline: a prompt, what its samples came to, and the group they form.

    group = Group(prompt, [Episode, ...])            # one episode a sample
    episode.leaves[0].tokens.versions                # [T]: which policy made each token

Plain data, no torch: these objects cross process borders. What is done with them (tokenising, generating, scoring,
training) lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import Receipt
from rljob_trainer.episodes.tokens import ByteArray, Tokens

FinishReason = Literal["stop", "length", "deadline", "aborted"]
"""Why nothing more was said: the model ended, the answer was as long as it may be, its group had to be trained
(``pipeline.staleness.onDeadline: end``), or it was interrupted and goes on."""


Speaker = Literal["model", "environment", "rewritten history"]


def is_cut(finish: str) -> bool:
    """Whether a ``FinishReason`` says that the model had more to say."""
    return finish in ("length", "deadline")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the feed hands it out.

    ``ordinal`` counts prompts over the whole run and is never reused; ``row`` is the position in the data
    set and ``epoch`` the pass over it. ``source`` routes rewards and validation.
    """

    ordinal: int
    epoch: int
    row: int
    source: str
    text: str
    token_ids: tuple[int, ...]
    answer: str | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    """What the chat template has made ``text`` of; empty without one."""
    reference: Any = None
    """The cell of the row that ``answer`` is the text of."""
    conversational: bool = False
    """The row's prompt is chat messages, and no text."""
    data_source: str | None = None
    """What the row's column ``data.train.sourceColumn`` says; None: there is none."""
    counted_as: str | None = None
    """The name of that in metrics, of which there are few; None: ``source`` is."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The score of one episode. ``score`` is the weighted sum of ``parts`` (one entry per reward function)."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    prediction: str | None = None
    """The extracted answer, for majority voting (maj@k)."""
    correct: bool | None = None
    error: str | None = None
    """Set when a reward function raised or timed out and the job said to score the episode anyway."""
    of: tuple[EpisodeId, int] | None = None
    """The episode that was scored, and the digest of its tokens."""
    turns: tuple[float, ...] = ()
    """How much of ``score`` each answer of the model has earned, in the order in which they stand in the episode; the
    rest of it, and what is not said of later answers, was earned at the end."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that reward functions gave, as ``function.name``; no parts of the score."""


class TurnSpan(NamedTuple):
    """A part of a leaf's tokens that an engine made in answer to one request."""

    start: int
    stop: int
    receipt: Receipt | None = None
    """What the engine said of it (``episodes/receipts.py``)."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One sequence to train on: what the model saw first, and the tokens from there to the end of a branch.

    An episode has one, unless its history was changed on the way: then what stood before the change is a leaf too.
    """

    prompt_ids: tuple[int, ...]
    tokens: Tokens
    receipt: Receipt | None = None
    """Of a leaf that is one answer, which is most of them: a driver holds a hundred thousand leaves."""
    spans: tuple[TurnSpan, ...] = ()
    """Of a leaf of several turns."""

    @property
    def turns(self) -> tuple[TurnSpan, ...]:
        """In order; what lies between them the model was given, and is masked."""
        return self.spans or (TurnSpan(0, len(self.tokens), self.receipt),)

    def continued(self, observed: Tokens, answer: Tokens, receipt: Receipt | None) -> Leaf:
        """The leaf with ``observed``, which the model was given, and the ``answer`` that it made to all before."""
        if observed.routed_experts is not None and len(seen := observed_experts(observed, answer)) == len(observed):
            observed = replace(observed, routed_experts=seen)
        start = len(self.tokens) + len(observed)
        span = TurnSpan(start, start + len(answer), receipt)
        return Leaf(self.prompt_ids, Tokens.joined([self.tokens, observed, answer]), spans=(*self.turns, span))


def observed_experts(observed: Sequence[int] | Tokens, answer: Tokens) -> ByteArray:
    """The experts of the tokens ``observed`` before an answer, ``[tokens, layers, k]`` as ``Tokens`` has them; ``[0]``
    where nothing is known. All before the answer was its prompt: the last rows that its engine has told of that are
    theirs."""
    seen = answer.prompt_experts
    if seen is None or not len(observed) or len(seen) < len(observed):
        return np.empty(0, np.uint8)
    return seen[-len(observed) :]


@dataclass(slots=True)
class Episode:
    """What one sample of a prompt came to."""

    id: EpisodeId
    leaves: Sequence[Leaf]
    finish: FinishReason
    text: str = ""
    """What reward functions see; empty once they have."""
    reward: RewardResult | None = None
    seconds: float = 0.0
    """From requests to answers, those of all turns together."""
    world_calls: int = 0
    """Calls of the world that have returned."""
    world_seconds: float = 0.0
    """From these calls to their results, all together."""
    made_for: tuple[int, ...] | None = None
    """The prompt that an environment's program was given, which may show the model something else; None: the first
    leaf begins with it."""
    returned: Any = None
    """What the program has returned: a number, or a mapping with ``score``."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The chat at its end, for reward functions; empty without one, and once they have seen it."""

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompts of all leaves, masked ones too."""
        return sum([len(leaf.tokens.ids) for leaf in self.leaves])

    @property
    def answers(self) -> int:
        """How often the model has spoken."""
        return sum(len(leaf.spans) or 1 for leaf in self.leaves)

    def answer_ends(self) -> Iterator[int | None]:
        """The place of each answer's last token in all tokens after the prompts; None of one that has no token."""
        before = 0
        for leaf in self.leaves:
            for turn in leaf.turns:
                yield before + turn.stop - 1 if turn.stop > turn.start else None
            before += len(leaf.tokens)

    @property
    def response_ids(self) -> list[int]:
        """The token ids after the prompt, leaf after leaf."""
        return [token for leaf in self.leaves for token in leaf.tokens.ids.tolist()]

    @property
    def has_turns(self) -> bool:
        """Whether there is more to it than one answer to its prompt."""
        return len(self.leaves) > 1 or any(len(leaf.turns) > 1 for leaf in self.leaves)

    def exchange(self) -> Iterator[tuple[Speaker, list[int]]]:
        """Who said which token ids after the prompt, in order. A leaf behind the first begins with all that the model
        saw when its history had been changed."""
        for number, leaf in enumerate(self.leaves):
            if number:
                yield "rewritten history", list(leaf.prompt_ids)
            behind = 0
            for turn in leaf.turns:
                if turn.start > behind:
                    yield "environment", leaf.tokens.ids[behind : turn.start].tolist()
                yield "model", leaf.tokens.ids[turn.start : turn.stop].tolist()
                behind = turn.stop

    @property
    def said_ids(self) -> list[int]:
        """The ids of the tokens that the model made, turn after turn: what it was given in between is left out."""
        said: list[int] = []
        for leaf in self.leaves:
            for turn in leaf.turns:
                said += leaf.tokens.ids[turn.start : turn.stop].tolist()
        return said


def single_turn(
    id: EpisodeId,
    prompt_ids: tuple[int, ...],
    tokens: Tokens,
    finish: FinishReason,
    *,
    receipt: Receipt | None = None,
    text: str = "",
    reward: RewardResult | None = None,
    seconds: float = 0.0,
) -> Episode:
    """An episode of one request and one answer."""
    return Episode(id, (Leaf(prompt_ids, tokens, receipt),), finish, text, reward, seconds)


@dataclass(slots=True)
class Group:
    """One prompt and the episodes of its n samples."""

    prompt: Prompt
    episodes: list[Episode] = field(default_factory=list)
    greedy_score: float | None = None
    """Score of the prompt's greedy response, for estimators that take it as their baseline (remax)."""

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of all episodes, in their order."""
        return [leaf for episode in self.episodes for leaf in episode.leaves]

    @property
    def oldest_version(self) -> int:
        """The smallest version among the tokens of all episodes; raises ``ValueError`` when there are none."""
        return min(int(leaf.tokens.versions.min()) for leaf in self.leaves if len(leaf.tokens))

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, of all episodes."""
        return sum(episode.response_tokens for episode in self.episodes)

    @property
    def mean_score(self) -> float | None:
        """The mean score of the episodes that have one; None when none is."""
        scores = [episode.reward.score for episode in self.episodes if episode.reward is not None]
        return sum(scores) / len(scores) if scores else None

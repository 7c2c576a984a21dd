"""What moves through the pipeline: a prompt, its samples, and the group they form.

Plain data, no torch: these objects cross process borders and are written into checkpoints. What is done
with them (tokenising, generating, scoring, training) lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rljob_trainer.receipts import Receipt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "aborted"]


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


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The score of one sample. ``score`` is the weighted sum of ``parts`` (one entry per reward function)."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    prediction: str | None = None
    """The extracted answer, for majority voting (maj@k)."""
    correct: bool | None = None
    error: str | None = None
    """Set when a reward function raised or timed out and the job said to score the sample anyway."""
    of: tuple[str, int] | None = None
    """``ORDINAL/INDEX`` of the sample that was scored, and the digest of its tokens."""


@dataclass(slots=True)
class Sample:
    """One response. All arrays are ``[T]`` over its response tokens, and are read, not written."""

    index: int
    """Position in its group, 0 .. n - 1."""
    token_ids: IntArray
    log_probs: FloatArray
    """Rollout log-probs, at the sampling temperature; 0 where ``mask`` is False."""
    versions: IntArray
    """The policy version that made each token; it never falls along a response."""
    mask: BoolArray
    """True where the model made the token (False: tool output)."""
    finish: FinishReason
    text: str = ""
    """What reward functions see; empty once they have."""
    reward: RewardResult | None = None
    seconds: float = 0.0
    """From its first request to its end."""
    receipt: Receipt | None = None
    """What its engine said of it (``receipts.py``)."""


@dataclass(slots=True)
class Group:
    """One prompt and its n samples."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    greedy_score: float | None = None
    """Score of the prompt's greedy response, for estimators that take it as their baseline (remax)."""

    @property
    def oldest_version(self) -> int:
        """The smallest version among the tokens of all samples; raises ``ValueError`` when there are none."""
        return min(int(s.versions.min()) for s in self.samples if s.versions.size)

    @property
    def response_tokens(self) -> int:
        """Of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def mean_score(self) -> float | None:
        """Of the samples that are scored; None when none is."""
        scores = [sample.reward.score for sample in self.samples if sample.reward is not None]
        return sum(scores) / len(scores) if scores else None

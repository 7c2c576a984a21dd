"""Whether a batch is what was made: each prompt once, each response as its engine's receipt has it, each reward for the
response that it stands at, and all of it where the layout says. Looked at before anything is computed; what models then
score is looked at before anything is computed from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rljob_trainer.episodes.episode import Episode, Group
from rljob_trainer.episodes.receipts import check_episode, digest_of
from rljob_trainer.episodes.tokens import BoolArray, FloatArray
from rljob_trainer.errors import EngineError, IntegrityError, LearnerError
from rljob_trainer.learner.protocol import ScoreResult
from rljob_trainer.training.batch import TrainingBatch

_REMEDY = "Start again: the run continues from its last checkpoint. If it happens again, please report it"
_ROUNDING = 0.01
"""Nats by which a log-prob may exceed 0: float32 logits of 1e5 leave that much of their difference."""
_REMEMBERED = 64
"""Steps whose prompts are known."""


class TrainedPrompts:
    """Which prompts were trained in the latest steps."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        """By ordinal."""

    def check(self, groups: Sequence[Group], step: int) -> None:
        """Raises ``IntegrityError`` for a prompt that is there twice or was trained before."""
        seen: set[int] = set()
        for group in groups:
            ordinal = group.prompt.ordinal
            if ordinal in seen:
                raise IntegrityError(
                    f"prompt {ordinal} is in the batch of step {step} twice: a group was duplicated, perhaps in place "
                    f"of another. {_REMEDY}"
                )
            seen.add(ordinal)
            if (before := self._steps.get(ordinal)) is not None:
                raise IntegrityError(
                    f"prompt {ordinal} would be trained on again in step {step}: it was already used in step {before}. "
                    f"{_REMEDY}"
                )

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """They have been."""
        self._steps |= {group.prompt.ordinal: step for group in groups}
        if len(self._steps) > 2 * _REMEMBERED * max(1, len(groups)):
            self._steps = {ordinal: s for ordinal, s in self._steps.items() if s > step - _REMEMBERED}


def check_groups(groups: Sequence[Group], version: int) -> None:
    """``version``: that of the trainer's weights. Raises ``IntegrityError``, ``ReceiptError`` and, for a log-prob that
    no sampled token can have, ``EngineError``; each names the sample."""
    for group in groups:
        for episode in group.episodes:
            _check_place(group, episode)
            check_episode(episode)
            if episode.reward is not None and episode.reward.of is not None:
                scored, seen = episode.reward.of
                if scored != episode.id:
                    raise IntegrityError(
                        f"the reward of {episode.id} belongs to {scored}: rewards were swapped. {_REMEDY}"
                    )
                if seen != digest_of(episode):
                    raise IntegrityError(
                        f"the reward of {episode.id} was given for tokens that differ from the sample's. {_REMEDY}"
                    )
    _check_tokens(groups, version)


def _check_place(group: Group, episode: Episode) -> None:
    """Every episode is of the prompt that its group has: its first leaf begins with that prompt, or its program was
    given it."""
    prompt = group.prompt
    if episode.id.ordinal != prompt.ordinal:
        raise IntegrityError(f"{episode.id} is in the group of prompt {prompt.ordinal}. {_REMEDY}")
    begins = episode.leaves[0].prompt_ids if episode.made_for is None else episode.made_for
    if begins is not prompt.token_ids and begins[: len(prompt.token_ids)] != prompt.token_ids:
        raise IntegrityError(f"{episode.id} was generated for tokens that differ from its prompt's. {_REMEDY}")


def _check_tokens(groups: Sequence[Group], version: int) -> None:
    samples = [(episode, leaf.tokens) for group in groups for episode in group.episodes for leaf in episode.leaves]
    streams = (np.concatenate([getattr(own, name) for _, own in samples]) for name in ("mask", "log_probs", "versions"))
    mask, log_probs, versions = streams
    impossible, unknown = np.flatnonzero(mask & ~possible(log_probs)), np.flatnonzero(versions > version)
    if not len(impossible) and not len(unknown):
        return
    token = int((impossible if len(impossible) else unknown)[0])
    ends = np.cumsum([len(own) for _, own in samples])
    row = int(np.searchsorted(ends, token, side="right"))
    episode, own = samples[row]
    if len(impossible):
        raise EngineError(
            f"the log-prob of response token {token - ends[row] + len(own)} of {episode.id} is {log_probs[token]:g} by "
            "the engine that sampled it, which is impossible for a sampled token: its model computes invalid "
            "probabilities. Check the engine's log, and its weights' dtype and device"
        )
    raise IntegrityError(
        f"{episode.id} has tokens of version {own.versions.max()}, but the newest published version is {version}: its "
        f"engine numbers its weights wrongly, so ages are wrong as well. {_REMEDY}"
    )


def possible(log_probs: FloatArray) -> BoolArray:
    """Which of them are logarithms of a positive probability."""
    return np.isfinite(log_probs) & (log_probs <= _ROUNDING)


def check_layout(batch: TrainingBatch, groups: Sequence[Group]) -> None:
    """Raises ``IntegrityError`` naming the stream and the sample that is not where it should be."""
    for wrong in _misplaced(batch, groups):
        raise IntegrityError(f"{wrong} in the batch is not the sample's own: it was changed or moved. {_REMEDY}")


def check_scored(scored: ScoreResult, batch: TrainingBatch, step: int) -> None:
    """Raises ``LearnerError`` naming the sample and the model that scored no finite number, or a log-prob above 0, for
    a token that is trained.

    A loss may hide it: clamps and absolute values let no gradient of a NaN through, which a step would be refused for.
    """
    mask, ends = batch.sequences.mask, np.asarray(batch.offsets)[1:]
    for what, model, stream in (
        ("log-prob", "policy", scored.log_probs),
        ("sum of squared probabilities", "policy", scored.sum_squared_probs),
        ("log-prob", "reference", scored.ref_log_probs),
        ("KL over the vocabulary", "policy or the reference", scored.vocabulary_kl),
        ("value", "critic", scored.values),
    ):
        if stream is None:
            continue
        bad = np.flatnonzero(mask & ~(possible(stream) if what == "log-prob" else np.isfinite(stream)))
        if len(bad):
            row = int(np.searchsorted(ends, bad[0], side="right"))
            where = f"of response token {bad[0] - int(batch.offsets[row])}"
            _refuse_scored(what, model, float(stream[bad[0]]), where, batch.owner(row), step)
    if scored.final_values is not None:
        final = scored.final_values[batch.last_leaf]
        for row in np.flatnonzero(batch.truncated & ~np.isfinite(final))[:1].tolist():
            where, value = "after the last response token", float(final[row])
            _refuse_scored("value", "critic", value, where, batch.episodes[row], step)


def _refuse_scored(what: str, model: str, value: float, where: str, episode: Episode, step: int) -> NoReturn:
    raise LearnerError(
        f"step {step}: the {what} {where} of {episode.id} is {value:g} from the {model}, which cannot be trained on; "
        f"check the {model}'s weights and the sample"
    )


def _misplaced(batch: TrainingBatch, groups: Sequence[Group]) -> Iterator[str]:
    """All samples at once: comparing them costs less than a call for each."""
    sequences = batch.sequences
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [(episode, leaf) for episode in episodes for leaf in episode.leaves]
    lengths = np.array([len(leaf.tokens) for _, leaf in rows])
    ends = np.cumsum(lengths)
    responses = np.arange(ends[-1]) + np.repeat(np.cumsum([len(leaf.prompt_ids) for _, leaf in rows]), lengths)
    for what, name, laid in (
        ("row of token ids", "ids", sequences.token_ids[responses[responses < len(sequences.token_ids)]]),
        ("mask", "mask", sequences.mask),
        ("row of log-probs", "log_probs", sequences.rollout_log_probs),
    ):
        own = np.concatenate([getattr(leaf.tokens, name) for _, leaf in rows])
        if laid is not None and (token := _apart(laid, own)) is not None:
            row = int(np.searchsorted(ends, token, side="right"))
            yield f"the {what} of {rows[min(row, len(rows) - 1)][0].id}"
    if (moved := _apart(batch.offsets, np.concatenate([[0], ends]))) is not None:
        yield f"the row of token ids of {rows[min(max(moved - 1, 0), len(rows) - 1)][0].id}"
    scores = np.array([episode.reward.score for episode in episodes if episode.reward is not None], np.float32)
    if (number := _apart(batch.scores, scores)) is not None:
        yield f"the score of {episodes[min(number, len(episodes) - 1)].id}"


def _apart(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int | None:
    """The first place at which two arrays differ; a NaN is like another."""
    both = min(len(one), len(other))
    a, b = one[:both], other[:both]
    places = np.flatnonzero((a != b) & ((a == a) | (b == b)))
    return int(places[0]) if len(places) else None if len(one) == len(other) else both

"""Why engines and trainer disagree, where the streams themselves tell.

A gap between the engines' log-probs and the trainer's has many causes; some have a shape. Each hypothesis is tried on
the streams of a batch, and one is named when it explains nearly all of the gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rljob_trainer.episodes.tokens import BoolArray, FloatArray

NOTICEABLE = 1e-4
"""Nats per token: ten times what float32 kernels differ by. Below it there is nothing to explain."""
_EXPLAINED = 0.1
"""What may be left of the gap, as a share, if a cause is to be named."""
_ALIKE = 0.8
"""Correlation of streams that may differ by temperature alone."""
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
"""Which are tried."""

Offsets = npt.NDArray[np.int64]


def gap(trainer: FloatArray, engine: FloatArray, mask: BoolArray) -> float:
    """Mean |log pi_trainer - log pi_engine| over the tokens of ``mask``; all ``[tokens]``."""
    return float(np.abs(trainer - engine)[mask].mean()) if mask.any() else 0.0


def shifted(trainer: FloatArray, engine: FloatArray, mask: BoolArray, offsets: Offsets) -> str:
    """In words, if the engines' log-probs stand one place too late or too early in every response; else empty."""
    whole = gap(trainer, engine, mask)
    for by, words in ((1, "later"), (-1, "earlier")):
        # Of the token before (or after) in the same response; where there is none nothing is compared.
        moved, known = np.roll(trainer, by), mask.copy()
        ends = offsets[:-1] if by == 1 else offsets[1:] - 1
        known[ends[np.diff(offsets) > 0]] = False
        if known.sum() * 2 >= mask.sum() and gap(moved, engine, known) < _EXPLAINED * whole:
            return f"the engines' log-probs are shifted: each is one position {words} than its token"
    return ""


def alike(trainer: FloatArray, engine: FloatArray, mask: BoolArray) -> bool:
    """Whether likely tokens of the one are likely ones of the other, as another temperature would leave it."""
    ours, theirs = trainer[mask].astype(np.float64), engine[mask].astype(np.float64)
    spread = ours.std() * theirs.std()
    return bool(spread > 0 and ((ours - ours.mean()) * (theirs - theirs.mean())).mean() > _ALIKE * spread)


def of_temperature(scored: Mapping[float, FloatArray], engine: FloatArray, own: float) -> str:
    """In words, if the engines' log-probs ``[tokens]`` are those of another temperature than the job's ``own``; else
    empty. ``scored``: the trainer's of the same tokens at several temperatures, ``own`` among them."""
    everything = np.ones(len(engine), dtype=np.bool_)
    gaps = {temperature: gap(stream, engine, everything) for temperature, stream in scored.items()}
    best = min(gaps, key=lambda temperature: gaps[temperature])
    if best == own or not gaps[best] < _EXPLAINED * gaps[own]:
        return ""
    return (
        f"the engines' log-probs are those of temperature {best:g}, not of the job's {own:g}: check what the engine "
        "reports (rollout.engineArgs; vLLM needs logprobs_mode processed_logprobs)"
    )


def few(lengths: Sequence[int], alike: Sequence[bool], most: int = 16) -> list[int]:
    """Sequences to look at more closely: the longest of those that are ``alike``."""
    order = sorted((i for i, same in enumerate(alike) if same and lengths[i]), key=lambda i: -lengths[i])
    return sorted(order[:most])

"""Which cause is named for a gap between engines and trainer, on streams whose cause is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rljob_trainer.training.attribution import of_temperature, shifted

OFFSETS = np.array([0, 40, 40, 64, 100])
MASK = np.ones(100, np.bool_)
STREAM = -np.random.default_rng(3).exponential(1.0, 100).astype(np.float32)


def moved(by: int) -> np.ndarray:
    parts = [np.roll(STREAM[a:b], by) for a, b in pairwise(OFFSETS)]
    return np.concatenate(parts)


def test_a_shift_is_named_with_its_direction() -> None:
    assert "one position later" in shifted(STREAM, moved(1), MASK, OFFSETS)
    assert "one position earlier" in shifted(STREAM, moved(-1), MASK, OFFSETS)


def test_noise_is_no_shift() -> None:
    noisy = STREAM + np.random.default_rng(4).normal(0, 0.3, 100).astype(np.float32)
    assert shifted(STREAM, noisy, MASK, OFFSETS) == ""


def test_a_temperature_is_named_when_it_explains_the_gap() -> None:
    logits = np.random.default_rng(5).normal(0, 2, (100, 11))
    chosen = np.random.default_rng(6).integers(0, 11, 100)

    def at(temperature: float) -> np.ndarray:
        scaled = logits / temperature
        return (scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))[np.arange(100), chosen].astype(np.float32)

    scored = {temperature: at(temperature) for temperature in (0.8, 1.0, 1.3)}
    assert "those of temperature 1, not of the job's 0.8" in of_temperature(scored, at(1.0), 0.8)
    assert of_temperature(scored, at(0.8), 0.8) == ""
    # Half-way between two candidates neither explains it.
    assert of_temperature(scored, at(0.9), 0.8) == ""

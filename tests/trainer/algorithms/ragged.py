"""Random batches of sequences of different lengths, as lists for the oracles and as streams for the code under test.

Oracles see only what the mask keeps (`kept`): to them a masked token does not exist. The code under test gets whole
streams with NaN at every masked position (`stream`). Values are float32 numbers, so that both precisions start from
the same input.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st

from rljob_trainer.algorithms import Segments, aggregations

Rows = list[list[float]]
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
PRECISIONS = [torch.float64, torch.float32]

deviations: dict[tuple[str, str], float] = {}


@dataclass
class Ragged:
    lengths: list[int]
    keep: list[list[bool]]
    groups: list[int]
    rows: dict[str, Rows] = field(default_factory=dict)
    """Whole rows, masked tokens too."""
    scalars: dict[str, list[float]] = field(default_factory=dict)
    """One number a sequence."""

    @property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.lengths)

    def segments_for(self, aggregation: str, dtype: torch.dtype) -> Segments:
        """With what a sequence counts for, where it is its part of the tokens of its prompt."""
        if not aggregations[aggregation].over_prompts:
            return self.segments
        return replace(self.segments, shares=self.vector("prompt_share", dtype))

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor([k for row in self.keep for k in row], dtype=torch.bool)

    def kept(self, name: str) -> Rows:
        return [
            [v for v, k in zip(row, keep, strict=True) if k]
            for row, keep in zip(self.rows[name], self.keep, strict=True)
        ]

    def stream(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.tensor([v for row in self.rows[name] for v in row], dtype=dtype)
        return torch.where(self.mask, flat, torch.nan)

    def vector(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(self.scalars[name], dtype=dtype)

    def reordered(self, order: list[int]) -> Ragged:
        return Ragged(
            [self.lengths[i] for i in order],
            [self.keep[i] for i in order],
            [self.groups[i] for i in order],
            {name: [rows[i] for i in order] for name, rows in self.rows.items()},
            {name: [values[i] for i in order] for name, values in self.scalars.items()},
        )


def agree(name: str, actual: torch.Tensor, batch: Ragged, expected: Rows) -> None:
    """The stream equals the oracle's rows at kept tokens and is 0 elsewhere."""
    outside = actual[~batch.mask]
    assert bool((outside == 0).all()), f"{name}: masked positions are not 0: {outside}"
    near(name, actual[batch.mask], [v for row in expected for v in row])


def near(name: str, actual: torch.Tensor, expected: list[float] | float) -> None:
    """Relative error, floor 1, within the precision's tolerance; records the largest one seen."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == wanted.shape
    if actual.numel() == 0:
        return
    error = float(((actual.detach().double() - wanted).abs() / wanted.abs().clamp(min=1)).max())
    precision = "float32" if actual.dtype == torch.float32 else "float64"
    deviations[name, precision] = max(deviations.get((name, precision), 0.0), error)
    assert error <= TOLERANCE.get(actual.dtype, 1e-6), f"{name}: off by {error:.2e} of max(1, |expected|)"


def _single(values: np.ndarray) -> list[float]:
    return [float(v) for v in np.asarray(values, dtype=np.float32)]


@st.composite
def batches(draw: st.DrawFn, *, extreme: bool = True, smallest_group: int = 2, longest: int = 9) -> Ragged:
    """1-3 groups of 2-4 samples of 0-9 tokens; with ``extreme`` also log-ratios of +-40 and constant rewards."""
    sizes = draw(st.lists(st.integers(smallest_group, 4), min_size=1, max_size=3))
    lengths = [draw(st.integers(0, longest)) for size in sizes for _ in range(size)]
    masked = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0 if extreme else 0.5]))
    seed = draw(st.integers(0, 2**32 - 1))
    wild = extreme and draw(st.booleans())
    constant = extreme and draw(st.booleans())
    return make_batch(sizes, lengths, masked, seed, wild=wild, constant=constant)


def make_batch(
    sizes: list[int], lengths: list[int], masked: float, seed: int, *, wild: bool = False, constant: bool = False
) -> Ragged:
    """Streams that look like a run's: log-probs below 0, values and advantages of either sign, scores 0, 1 or other."""
    rng = np.random.default_rng(seed)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    keep = [[bool(k) for k in rng.random(n) >= masked] for n in lengths]
    batch = Ragged(lengths, keep, groups)

    def rows(make: object) -> Rows:
        return [_single(make(n)) for n in lengths]  # type: ignore[operator]

    current = rows(lambda n: rng.uniform(-4.0, -0.02, n))
    names = {"old": 0.3, "rollout": 0.4, "reference": 0.8}
    batch.rows["log_probs"] = current
    for name, width in names.items():
        batch.rows[name] = [
            _single(np.minimum(np.array(row) + rng.normal(0, width, len(row)), -0.01)) for row in current
        ]
    if wild:
        for name in ("old", "rollout", "reference"):
            for row, other in zip(current, batch.rows[name], strict=True):
                for t in range(len(row)):
                    pick = rng.random()
                    if pick < 0.1:
                        row[t], other[t] = -45.0, -5.0
                    elif pick < 0.2:
                        row[t], other[t] = -5.0, -45.0
    batch.rows["values"] = rows(lambda n: rng.normal(0, 1, n))
    batch.rows["old_values"] = rows(lambda n: rng.normal(0, 1, n))
    batch.rows["returns"] = rows(lambda n: rng.normal(0, 1, n))
    batch.rows["rewards"] = rows(lambda n: rng.normal(0, 0.3, n))
    batch.rows["advantages"] = rows(lambda n: rng.normal(0, 1, n))
    batch.rows["per_token"] = rows(lambda n: rng.normal(0, 1, n))
    batch.rows["entropy"] = rows(lambda n: rng.uniform(0, 3, n))
    batch.rows["weights"] = rows(lambda n: rng.uniform(0, 2, n))
    # Of the token itself and of the others, which have what it leaves of the probability.
    batch.rows["squares"] = [
        _single(np.exp(2 * np.array(row)) + rng.uniform(0, 1, len(row)) * np.expm1(row) ** 2) for row in current
    ]
    count = len(lengths)
    scores = rng.choice([0.0, 1.0, 0.3], count) + (rng.random(count) < 0.3) * rng.normal(0, 1, count)
    batch.scalars["scores"] = [0.1 if constant else v for v in _single(scores)]
    if constant:
        batch.scalars["scores"] = _single(np.full(count, 0.1))
    own = [sum(row) for row in keep]
    whole = [sum(n for n, other in zip(own, groups, strict=True) if other == g) for g in groups]
    batch.scalars["prompt_share"] = [n / max(all_, 1) for n, all_ in zip(own, whole, strict=True)]
    batch.scalars["wins"] = _single(rng.integers(0, 2, count))
    batch.scalars["final_values"] = _single(rng.normal(0, 1, count))
    batch.scalars["truncated"] = _single(rng.integers(0, 2, count))
    batch.scalars["greedy"] = _single(rng.normal(0, 1, count))
    batch.scalars["part_a"] = _single(rng.integers(0, 2, count))
    batch.scalars["part_b"] = _single(rng.normal(0, 1, count))
    return batch

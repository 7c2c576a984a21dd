"""Every advantage estimator against its oracle, on random ragged batches with NaN at every masked token."""

from __future__ import annotations

from collections.abc import Callable

import oracle_advantages as oracle
import pytest
import torch
from hypothesis import given
from ragged import PRECISIONS, Ragged, Rows, agree, batches

from rljob_trainer.algorithms import AdvantageInputs, Segments, advantage_estimators, advantages, gradient_noise

PRECISION = pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])


def inputs(batch: Ragged, dtype: torch.dtype, **more: torch.Tensor | None) -> AdvantageInputs:
    given_streams: dict[str, torch.Tensor | None] = {"scores": batch.vector("scores", dtype)}
    return AdvantageInputs(
        mask=batch.mask, segments=batch.segments, groups=torch.tensor(batch.groups) * 7 - 3, **(given_streams | more)
    )


def counts(batch: Ragged) -> list[int]:
    return [sum(row) for row in batch.keep]


def sequence_rewards(batch: Ragged) -> list[float]:
    """The sum of kept token rewards, or the score where nothing is kept."""
    rewards = batch.kept("rewards")
    return [sum(row) if row else score for row, score in zip(rewards, batch.scalars["scores"], strict=True)]


@PRECISION
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.9), (0.9, 1.0)])
@given(batch=batches())
def test_gae_is_the_exponential_sum_of_temporal_differences(
    dtype: torch.dtype, gamma: float, lam: float, batch: Ragged
) -> None:
    after = [f * t for f, t in zip(batch.scalars["final_values"], batch.scalars["truncated"], strict=True)]
    expected, targets = oracle.gae(batch.kept("rewards"), batch.kept("values"), after, gamma, lam)
    given_ = inputs(
        batch,
        dtype,
        scores=None,
        rewards=batch.stream("rewards", dtype),
        values=batch.stream("values", dtype),
        final_values=batch.vector("final_values", dtype),
        truncated=batch.vector("truncated", dtype).bool(),
    )
    plain = advantages("gae", given_, gamma=gamma, whiten=False, **{"lambda": lam})
    agree("advantage gae", plain.advantages, batch, expected)
    assert plain.returns is not None
    agree("advantage gae (returns)", plain.returns, batch, targets)

    white = advantages("gae", given_, gamma=gamma, lambda_=lam)
    agree("advantage gae (whitened)", white.advantages, batch, oracle.whiten(expected))
    assert torch.equal(white.returns, plain.returns)  # type: ignore[arg-type]


@PRECISION
@given(batch=batches())
def test_gae_without_bootstrap_ends_in_zero(dtype: torch.dtype, batch: Ragged) -> None:
    rewards = oracle.token_rewards(batch.scalars["scores"], counts(batch))
    expected, _ = oracle.gae(rewards, batch.kept("values"), [0.0] * len(batch.lengths), 1.0, 0.95)
    result = advantages("gae", inputs(batch, dtype, values=batch.stream("values", dtype)), lambda_=0.95, whiten=False)
    agree("advantage gae (scores)", result.advantages, batch, expected)


GroupOracle = Callable[[list[float], Ragged], list[float]]
OF_GROUPS: dict[str, tuple[dict[str, object], GroupOracle]] = {
    "grpo": ({}, lambda r, b: oracle.grpo(r, b.groups, True, 1e-6)),
    "grpo without std": ({"normalize_by_std": False}, lambda r, b: oracle.grpo(r, b.groups, False, 0)),
    "grpo_passk": ({}, lambda r, b: oracle.grpo_passk(r, b.groups, True, 1e-6)),
    "grpo_passk without std": ({"normalize_by_std": False}, lambda r, b: oracle.grpo_passk(r, b.groups, False, 0)),
    "rloo": ({}, lambda r, b: oracle.rloo(r, b.groups)),
    "opo": ({}, lambda r, b: oracle.opo(r, b.groups, counts(b))),
    "gpg": ({}, lambda r, b: oracle.gpg(r, b.groups)),
}


@PRECISION
@pytest.mark.parametrize("name", OF_GROUPS)
@given(batch=batches(smallest_group=1))
def test_group_estimators(dtype: torch.dtype, name: str, batch: Ragged) -> None:
    settings, expected = OF_GROUPS[name]
    estimator = name.split()[0]
    scores = advantages(estimator, inputs(batch, dtype), **settings)
    agree(
        f"advantage {name}",
        scores.advantages,
        batch,
        oracle.broadcast(expected(batch.scalars["scores"], batch), counts(batch)),
    )

    with_rewards = inputs(batch, dtype, rewards=batch.stream("rewards", dtype))
    agree(
        f"advantage {name}",
        advantages(estimator, with_rewards, **settings).advantages,
        batch,
        oracle.broadcast(expected(sequence_rewards(batch), batch), counts(batch)),
    )


@PRECISION
@given(batch=batches(smallest_group=1))
def test_maxrl(dtype: torch.dtype, batch: Ragged) -> None:
    wins = batch.scalars["wins"]
    result = advantages("maxrl", inputs(batch, dtype, scores=batch.vector("wins", dtype)))
    expected = oracle.broadcast(oracle.maxrl(wins, batch.groups, 1e-6), counts(batch))
    agree("advantage maxrl", result.advantages, batch, expected)


@PRECISION
@given(batch=batches())
def test_gdpo_normalises_each_reward_alone(dtype: torch.dtype, batch: Ragged) -> None:
    parts = torch.stack([batch.vector("part_a", dtype), batch.vector("part_b", dtype)], dim=1)
    result = advantages("gdpo", inputs(batch, dtype, parts=parts, part_weights=torch.tensor([1.0, 0.25])))
    a = oracle.grpo(batch.scalars["part_a"], batch.groups, True, 1e-6)
    b = oracle.grpo(batch.scalars["part_b"], batch.groups, True, 1e-6)
    total = [x + 0.25 * y for x, y in zip(a, b, strict=True)]
    agree("advantage gdpo", result.advantages, batch, oracle.whiten(oracle.broadcast(total, counts(batch))))


@PRECISION
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@given(batch=batches(smallest_group=1))
def test_return_estimators(dtype: torch.dtype, gamma: float, batch: Ragged) -> None:
    rewards = batch.kept("rewards")
    gains = oracle.returns(rewards, gamma)
    given_ = inputs(batch, dtype, rewards=batch.stream("rewards", dtype), greedy_scores=batch.vector("greedy", dtype))

    whitened = advantages("reinforce_plus_plus", given_, gamma=gamma)
    agree("advantage reinforce_plus_plus", whitened.advantages, batch, oracle.whiten(gains))

    baseline = oracle.mean(sequence_rewards(batch))
    minus_mean: Rows = [[g - baseline for g in row] for row in gains]
    agree("advantage reinforce", advantages("reinforce", given_, gamma=gamma).advantages, batch, minus_mean)

    undiscounted = oracle.returns(rewards, 1.0)
    minus_greedy = [[g - b for g in row] for row, b in zip(undiscounted, batch.scalars["greedy"], strict=True)]
    agree("advantage remax", advantages("remax", given_).advantages, batch, minus_greedy)

    centred = oracle.grpo(sequence_rewards(batch), batch.groups, False, 0)
    expected = oracle.whiten(oracle.broadcast(centred, counts(batch)))
    result = advantages("reinforce_plus_plus_baseline", given_)
    agree("advantage reinforce_plus_plus_baseline", result.advantages, batch, expected)


@PRECISION
@given(batch=batches())
def test_whitening_is_a_choice(dtype: torch.dtype, batch: Ragged) -> None:
    """Each of the four off its default: REINFORCE whitened, the others as they are."""
    rewards = batch.kept("rewards")
    parts = torch.stack([batch.vector("part_a", dtype), batch.vector("part_b", dtype)], dim=1)
    given_ = inputs(batch, dtype, rewards=batch.stream("rewards", dtype), parts=parts)
    gains = oracle.returns(rewards, 0.9)
    centred = oracle.grpo(sequence_rewards(batch), batch.groups, False, 0)
    a, b = (oracle.grpo(batch.scalars[name], batch.groups, True, 1e-6) for name in ("part_a", "part_b"))
    baseline = oracle.mean(sequence_rewards(batch))
    expected: dict[str, tuple[dict[str, object], Rows]] = {
        "reinforce": ({"whiten": True, "gamma": 0.9}, oracle.whiten([[g - baseline for g in row] for row in gains])),
        "reinforce_plus_plus": ({"whiten": False, "gamma": 0.9}, gains),
        "reinforce_plus_plus_baseline": ({"whiten": False}, oracle.broadcast(centred, counts(batch))),
        "gdpo": (
            {"whiten": False},
            oracle.broadcast([x + y for x, y in zip(a, b, strict=True)], counts(batch)),
        ),
    }
    for name, (settings, rows) in expected.items():
        agree(f"advantage {name} (other)", advantages(name, given_, **settings).advantages, batch, rows)


@PRECISION
@pytest.mark.parametrize("weighted", [False, True])
@given(batch=batches())
def test_token_baselines(dtype: torch.dtype, weighted: bool, batch: Ragged) -> None:
    given_ = inputs(
        batch,
        dtype,
        rewards=batch.stream("rewards", dtype),
        log_probs=batch.stream("log_probs", dtype),
        sum_squared_probs=batch.stream("squares", dtype),
        weights=batch.stream("weights", dtype) if weighted else None,
    )
    raw = [[t for t, kept in enumerate(row) if kept] for row in batch.keep]
    compact = [list(range(sum(row))) for row in batch.keep]
    for name, positions in (("optimal_token_baseline", raw), ("tir_optimal_token_baseline", compact)):
        expected = oracle.token_baseline(
            batch.kept("rewards"),
            batch.kept("log_probs"),
            batch.kept("squares"),
            batch.kept("weights") if weighted else None,
            positions,
            batch.groups,
            0.9,
            1e-30,
        )
        agree(f"advantage {name}", advantages(name, given_, gamma=0.9).advantages, batch, expected)


def everything(batch: Ragged, dtype: torch.dtype, scores: str = "wins") -> AdvantageInputs:
    return inputs(
        batch,
        dtype,
        scores=batch.vector(scores, dtype),
        values=batch.stream("values", dtype),
        greedy_scores=batch.vector("greedy", dtype),
        parts=torch.stack([batch.vector("part_a", dtype), batch.vector("part_b", dtype)], dim=1),
        log_probs=batch.stream("log_probs", dtype),
        sum_squared_probs=batch.stream("squares", dtype),
    )


@pytest.mark.parametrize("name", advantage_estimators)
@given(batch=batches())
def test_the_order_of_the_batch_does_not_matter(name: str, batch: Ragged) -> None:
    order = list(range(len(batch.lengths)))[::-1]
    order = order[1:] + order[:1]
    if name == "grpo_passk":  # among equally good responses the first counts; their lead is 0 either way
        order = sorted(order, key=lambda i: batch.groups[i])
    straight = advantages(name, everything(batch, torch.float64)).advantages
    pieces = straight.split(batch.lengths)
    moved = advantages(name, everything(batch.reordered(order), torch.float64)).advantages
    torch.testing.assert_close(moved, torch.cat([pieces[i] for i in order]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "gdpo"])
def test_equal_rewards_give_exactly_nothing(name: str) -> None:
    """0.1 is no binary fraction: a float32 mean of eight need not be 0.1, and what is left, over 1e-6, is noise."""
    from ragged import make_batch

    batch = make_batch([8, 7], [3] * 15, 0.0, seed=1, constant=True)
    given_ = inputs(batch, torch.float32, parts=batch.vector("scores", torch.float32)[:, None])
    assert float(advantages(name, given_).advantages.abs().max()) == 0.0


def test_gradient_noise_of_two_samples_by_hand() -> None:
    """Energies (1 - 2 pi + sum of squares) 0.5 + 0.25 and 0.5, mean advantages 2 and -1, a third sample all masked."""
    nan = float("nan")
    inputs_ = AdvantageInputs(
        mask=torch.tensor([True, True, True, False, False]),
        segments=Segments.from_lengths([2, 2, 1]),
        scores=torch.zeros(3),
        log_probs=torch.tensor([0.5, 0.75, 0.5, nan, nan]).log(),
        sum_squared_probs=torch.tensor([0.5, 0.625, 0.5, nan, nan]),
    )
    metrics = gradient_noise(inputs_, torch.tensor([1.0, 3.0, -1.0, nan, nan]), gradient_norm=0.5)
    power = (2**2 * 0.625 + 1 * 0.5) / 2
    assert metrics == pytest.approx(
        {
            "variance/signal_strength": 0.25,
            "variance/total_power": power,
            "variance/pure_noise": power - 0.25,
            "variance/squared_advantage": 2.5,
            "variance/weight": 0.5625,
        }
    )

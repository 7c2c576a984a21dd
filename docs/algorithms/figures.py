"""Draws the figures of these pages from the code itself: `python docs/algorithms/figures.py` .

Each function below is a figure and has its name; a test compares the files with what the code gives today.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from drawing import Panel, bars, panels
from torch import Tensor

from rljob_trainer.algorithms import (
    AdvantageInputs,
    LossCounts,
    PolicyInputs,
    Segments,
    advantages,
    aggregate,
    kl_estimators,
    policy_losses,
)
from rljob_trainer.algorithms.selection import resampling_weights
from rljob_trainer.algorithms.weights import within_bounds
from rljob_trainer.rewards.rules import overlong

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "benchmarks" / "learning" / "results" / "runs"
Settings = dict[str, float]


def policy(
    name: str, ratio: Tensor, advantage: float, *, log_old: float = -2.0, selected: bool = False, **settings: float
) -> tuple[Tensor, Tensor]:
    """Loss of one-token sequences with the given ratios, and minus its slope by log pi: how hard it pushes.

    ``log_old`` is log pi_old, and log pi_roll; ``selected`` is what the covariance losses chose.
    """
    count = ratio.numel()
    log_probs = (ratio.log() + log_old).requires_grad_()
    old = torch.full((count,), log_old, dtype=ratio.dtype)
    inputs = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=torch.full((count,), advantage, dtype=ratio.dtype),
        mask=torch.ones(count, dtype=torch.bool),
        segments=Segments.from_lengths([1] * count),
        selection=torch.full((count,), selected),
    )
    loss = policy_losses[name](inputs, **settings).per_token
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.detach(), -slope


def loss_against_ratio() -> str:
    ratio = torch.linspace(0.0, 4.0, 161, dtype=torch.float64).clamp(min=1e-9)
    shown: dict[str, tuple[str, Settings]] = {
        "ppoClip": ("ppoClip", {}),
        "ppoClip, dual clip 3": ("ppoClip", {"dual_clip": 3.0}),
        "ppoClip, clip 0.2/0.28": ("ppoClip", {"clip_high": 0.28}),
        "sapo": ("sapo", {}),
        "gmpo": ("gmpo", {}),
    }

    def panel(advantage: float, low: float, high: float) -> Panel:
        curves = {title: policy(name, ratio, advantage, **s)[0] for title, (name, s) in shown.items()}
        return Panel(f"A = {advantage:+g}", "pi_theta / pi_old", "loss", ratio, curves, low, high)

    return panels(panel(1.0, -4.0, 0.0), panel(-1.0, 0.0, 4.0))


def push_against_ratio() -> str:
    ratio = torch.linspace(0.0, 4.0, 161, dtype=torch.float64).clamp(min=1e-9)
    shown: dict[str, tuple[str, Settings]] = {
        "ppoClip, dual clip 3": ("ppoClip", {"dual_clip": 3.0}),
        "cispo, up to 1.5": ("cispo", {"clip_high": 0.5}),
        "tis, cap 2": ("tis", {}),
        "sapo": ("sapo", {}),
        "dppoKl": ("dppoKl", {}),
        "dppoTv": ("dppoTv", {}),
        "reinforce": ("reinforce", {}),
        "dro, beta 1": ("dro", {"beta": 1.0}),
    }

    def panel(advantage: float, low: float, high: float) -> Panel:
        curves = {title: policy(name, ratio, advantage, **s)[1] for title, (name, s) in shown.items()}
        return Panel(
            f"A = {advantage:+g}", "pi_theta / pi_old", "push on log pi", ratio, curves, low, high, intervals=5
        )

    return panels(panel(1.0, -1.0, 4.0), panel(-1.0, -4.0, 1.0))


REGIONS: dict[str, tuple[str, float, bool, Settings]] = {
    # title: loss, pi_old, whether a covariance loss has selected the token, settings
    "ppoClip, bypassPpoClip": ("ppoClip", 0.1, False, {}),
    "ppoClip, clip-higher 0.28": ("ppoClip", 0.1, False, {"clip_high": 0.28}),
    "ppoClip, dual clip 3": ("ppoClip", 0.1, False, {"dual_clip": 3.0}),
    "clipCov, selected token": ("clipCov", 0.1, True, {}),
    "klCov, selected token": ("klCov", 0.1, True, {}),
    "gspo, sequence's ratio": ("gspo", 0.1, False, {}),
    "gmpo": ("gmpo", 0.1, False, {}),
    "cispo": ("cispo", 0.1, False, {}),
    "tis": ("tis", 0.1, False, {}),
    "bypassReinforce": ("bypassReinforce", 0.1, False, {}),
    "reinforce, gpg": ("reinforce", 0.1, False, {}),
    "dppoTv, pi_old 0.1": ("dppoTv", 0.1, False, {}),
    "dppoTv, pi_old 0.9": ("dppoTv", 0.9, False, {}),
    "dppoKl, pi_old 0.1": ("dppoKl", 0.1, False, {}),
    "dppoKl, pi_old 0.9": ("dppoKl", 0.9, False, {}),
    "sapo": ("sapo", 0.1, False, {}),
    "dro, beta 1": ("dro", 0.1, False, {"beta": 1.0}),
}


def clip_regions() -> str:
    edges = torch.linspace(-3.0, 3.0, 1201, dtype=torch.float64)  # of log2 of the ratio
    ratio = torch.exp2((edges[1:] + edges[:-1]) / 2)
    ours, other, against, never = "push: rho A", "another weight", "against A", "impossible: pi above 1"

    def states(loss: str, old: float, selected: bool, settings: Settings, advantage: float) -> list[str]:
        possible = ratio * old <= 1.0
        log_old = math.log(old)
        push = policy(loss, ratio[possible], advantage, log_old=log_old, selected=selected, **settings)[1] * advantage

        def state(rho: float, push: float) -> str:
            if push == 0.0:
                return "none"
            if push < 0.0:
                return against
            return ours if math.isclose(push, rho, rel_tol=1e-9) else other

        known = [state(float(r), float(p)) for r, p in zip(ratio[possible], push, strict=True)]
        return known + [never] * (len(ratio) - len(known))

    return bars(
        ["A &gt; 0", "A &lt; 0"],
        "pi_theta / pi_old",
        edges.tolist(),
        {title: [states(*row, 1.0), states(*row, -1.0)] for title, row in REGIONS.items()},
        {ours: "#1b6ca8", other: "#a9cbe6", against: "#d1495b", never: "#e4e4e4"},
        {"1/8": -3.0, "1/4": -2.0, "1/2": -1.0, "1": 0.0, "2": 1.0, "4": 2.0, "8": 3.0},
    )


def covariance() -> str:
    """Which tokens of a random mini-batch are held back, with a larger fraction than usual so that there are some."""
    draw = random.Random(7)
    count = 500
    given = torch.tensor([draw.choice((-1.4, -0.6, 0.4, 1.2)) for _ in range(count)], dtype=torch.float64)
    inputs = PolicyInputs(
        log_probs=-torch.tensor([draw.expovariate(0.7) for _ in range(count)], dtype=torch.float64),
        advantages=given + torch.tensor([draw.gauss(0.0, 0.15) for _ in range(count)], dtype=torch.float64),
        mask=torch.ones(count, dtype=torch.bool),
        segments=Segments.from_lengths([count]),
    )
    x, y = inputs.log_probs - inputs.log_probs.mean(), inputs.advantages - inputs.advantages.mean()
    across = torch.linspace(-6.0, 2.0, 161, dtype=torch.float64)

    def panel(loss: str) -> Panel:
        chosen = policy_losses[loss].select_tokens(inputs, torch.Generator().manual_seed(1), covariance_fraction=0.04)
        # cov = 1: where the product of the two axes is 1
        curves = {f"cov = {c:g}": torch.where((c / across).abs() <= 2.0, c / across, torch.nan) for c in (1.0, 5.0)}
        others = ~chosen & (x > -6.0)
        marks = {"token": (x[others], y[others]), "selected": (x[chosen], y[chosen])}
        return Panel(loss, "log pi - mean", "A - mean", across, curves, -2.0, 2.0, marks=marks)

    return panels(panel("clipCov"), panel("klCov"))


def group_advantages() -> str:
    """Of groups of 8 answers with 0 ... 8 right ones, rewards 1 and 0."""
    size = 8
    right = torch.arange(size + 1)
    mask = torch.ones(size * (size + 1), dtype=torch.bool)
    inputs = AdvantageInputs(
        mask=mask,
        segments=Segments.from_lengths([1] * len(mask)),
        scores=(torch.arange(size)[None, :] < right[:, None]).double().flatten(),
        groups=right.repeat_interleave(size),
    )
    shown: dict[str, tuple[str, dict[str, bool]]] = {
        "grpo": ("grpo", {}),
        "Dr. GRPO": ("grpo", {"normalize_by_std": False}),
        "rloo": ("rloo", {}),
        "maxrl": ("maxrl", {}),
        "grpo_passk": ("grpo_passk", {}),
    }
    found = {t: advantages(name, inputs, **s).advantages.view(-1, size) for t, (name, s) in shown.items()}
    of_best = {title: torch.where(right > 0, a[:, 0], torch.nan) for title, a in found.items()}
    weight = {title: a.abs().sum(1) for title, a in found.items()}
    across, x = "right answers among 8", right.double()
    return panels(
        Panel("A of the first right answer", across, "advantage", x, of_best, 0.0, 8.0, dots=True),
        Panel("Weight of the prompt", across, "sum of |A| over the group", x, weight, 0.0, 16.0, dots=True),
    )


def gae_weights() -> str:
    """The advantages that a single reward of 1 gives to the tokens before it."""
    distance = torch.arange(101, dtype=torch.float64)
    rewards = torch.zeros(101, dtype=torch.float64)
    rewards[-1] = 1.0
    inputs = AdvantageInputs(
        mask=torch.ones(101, dtype=torch.bool),
        segments=Segments.from_lengths([101]),
        rewards=rewards,
        values=torch.zeros(101, dtype=torch.float64),
    )
    curves = {
        f"{decay:g}": advantages("gae", inputs, lambda_=decay, whiten=False).advantages.flip(0)
        for decay in (0.0, 0.9, 0.95, 0.99, 1.0)
    }
    title = "GAE by lambda, gamma 1"
    return panels(Panel(title, "tokens from t to delta", "weight of delta in A_t", distance, curves, 0.0, 1.0))


def aggregation_weights() -> str:
    names = ["tokenMean", "tokenSum", "seqMeanTokenMean", "seqMeanTokenSum", "seqMeanTokenSumNorm"]
    lengths = list(range(200, 1001, 100))

    def per_token(name: str, lengths: list[int]) -> Tensor:
        """How the aggregated loss of a mini-batch changes with the loss of each of its tokens."""
        segments = Segments.from_lengths(lengths)
        mask = torch.ones(segments.tokens, dtype=torch.bool)
        losses = torch.ones(segments.tokens, dtype=torch.float64, requires_grad=True)
        settings = {"scale": 1000.0} if name == "seqMeanTokenSumNorm" else {}
        total = aggregate(name, losses, segments, mask, LossCounts.of(mask, segments), **settings)
        return torch.autograd.grad(total, losses)[0]

    firsts = Segments.from_lengths(lengths).offsets[:-1]
    one = {name: per_token(name, lengths)[firsts].log10() for name in names}
    whole = {name: torch.stack([per_token(name, [n] * len(lengths)).sum() for n in lengths]).log10() for name in names}
    x = torch.tensor(lengths, dtype=torch.float64)
    mixed, alike = "9 sequences, 200 to 1000 tokens", "9 sequences of one length"
    return panels(
        Panel(mixed, "length of its sequence", "weight of a token", x, one, -4.0, 0.0, decades=True),
        Panel(alike, "length of all", "sum of all weights", x, whole, -1.0, 4.0, decades=True, intervals=5),
    )


def selection() -> str:
    lengths = torch.arange(0, 1025, 8)
    shaped = {
        f"buffer {buffer}, penalty {penalty:g}": torch.tensor(
            [overlong(int(n), longest=1024, buffer=buffer, penalty=penalty) for n in lengths], dtype=torch.float64
        )
        for buffer, penalty in ((512, 1.0), (256, 1.0), (256, 0.5))
    }
    scores = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    kinds = {"pow 1": ("pow", 1.0), "pow 2": ("pow", 2.0), "maxMin": ("maxMin", 1.0), "maxRandom": ("maxRandom", 1.0)}
    weights = {title: resampling_weights(scores, *kind) for title, kind in kinds.items()}
    drawn = {title: len(scores) * w / w.sum() for title, w in weights.items()}
    title = "Resampling a batch of 9 scores"
    return panels(
        Panel("Overlong, limit 1024", "response tokens", "added to the score", lengths.double(), shaped, -1.0, 0.0),
        Panel(title, "score", "expected draws", scores, drawn, 0.0, 5.0, dots=True, intervals=5),
    )


def weights() -> str:
    ratio = torch.linspace(0.0, 6.0, 301, dtype=torch.float64)
    curves = {
        "as it is": ratio,
        "high 2": within_bounds(ratio, None, 2.0),
        "low 0.5, high 5": within_bounds(ratio, 0.5, 5.0),
    }
    return panels(Panel("Importance weights", "pi_old / pi_roll", "weight", ratio, curves, 0.0, 6.0))


def kl() -> str:
    d = torch.linspace(-2.0, 2.0, 121, dtype=torch.float64)
    kinds = ["k1", "abs", "k2", "k3", "k3Straight"]

    def value_and_slope(kind: str) -> tuple[Tensor, Tensor]:
        x = d.clone().requires_grad_()
        value = kl_estimators[kind](x, torch.zeros_like(x))
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    both = {kind: value_and_slope(kind) for kind in kinds}
    across = "d = log pi_theta - log pi_ref"
    return panels(
        Panel("Value", across, "estimate", d, {k: v for k, (v, _) in both.items()}, -2.0, 4.0),
        Panel("Gradient", across, "slope by log pi", d, {k: s for k, (_, s) in both.items()}, -6.0, 2.0),
    )


def rescued_runs() -> str:
    """From the results of `benchmarks/learning`: the mean of the seeds; one that was over keeps its last score."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RUNS.glob("copy-corrections-*.json"))]
    steps = torch.arange(0, 201, 5)

    def curve(sampler: str, name: str) -> Tensor:
        of = [run["scores"] for run in found if (run["sampler"], run["name"]) == (sampler, name)]
        filled = [[math.nan, *scores, *[scores[-1]] * (len(steps) - 1 - len(scores))] for scores in of]
        return torch.tensor(filled, dtype=torch.float64).mean(0)

    names = [
        *("none", "bypass", "decoupled_token_is", "decoupled_token_icepop"),
        *("decoupled_seq_is_rs", "decoupled_k3_rs_token_tis", "interpolated"),
    ]
    return panels(
        *(
            Panel(title, "step", "exact answers", steps, {name: curve(title, name) for name in names}, 0.0, 1.0)
            for title in ("temperature 1.5", "5 % wrong log-probs", "4 versions old")
        )
    )


FIGURES: list[Callable[[], str]] = [
    loss_against_ratio,
    push_against_ratio,
    clip_regions,
    covariance,
    group_advantages,
    gae_weights,
    aggregation_weights,
    selection,
    weights,
    kl,
    rescued_runs,
]


def file_of(figure: Callable[[], str]) -> Path:
    return HERE / f"{figure.__name__.replace('_', '-')}.svg"


if __name__ == "__main__":
    for figure in FIGURES:
        file_of(figure).write_text(figure(), encoding="utf-8")

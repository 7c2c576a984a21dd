"""Draws the figures of these pages from the code itself: `python docs/algorithms/figures.py` (needs torch only)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rljob_trainer.algorithms import PolicyInputs, Segments, kl_estimators, policy_losses
from rljob_trainer.algorithms.weights import within_bounds

HERE = Path(__file__).parent
COLOURS = ["#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e8871e", "#555555"]
WIDTH, HEIGHT, MARGIN, LEGEND = 360, 250, 46, 24


@dataclass(frozen=True)
class Panel:
    """One set of axes: curves by name over common abscissae."""

    title: str
    across: str
    up: str
    x: Tensor
    curves: dict[str, Tensor]
    low: float
    high: float


def panel_svg(panel: Panel, left: int) -> str:
    """The panel as SVG elements, its left edge at ``left``."""
    x0, x1 = float(panel.x[0]), float(panel.x[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + MARGIN + (x - x0) / (x1 - x0) * (WIDTH - 2 * MARGIN)
        return across, HEIGHT - MARGIN - (y - panel.low) / (panel.high - panel.low) * (HEIGHT - 2 * MARGIN)

    (ax, ay), (bx, by) = at(x0, panel.low), at(x1, panel.high)
    middle = (ax + bx) / 2
    parts = [
        f'<rect x="{ax:.1f}" y="{by:.1f}" width="{bx - ax:.1f}" height="{ay - by:.1f}" fill="none" stroke="#999"/>',
        f'<text x="{middle:.1f}" y="{by - 10:.1f}" text-anchor="middle" font-weight="bold">{panel.title}</text>',
        f'<text x="{middle:.1f}" y="{ay + 32:.1f}" text-anchor="middle">{panel.across}</text>',
        f'<text transform="translate({ax - 34:.1f},{(ay + by) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{panel.up}</text>",
    ]
    for k in range(5):
        x, y = x0 + (x1 - x0) * k / 4, panel.low + (panel.high - panel.low) * k / 4
        px, py = at(x, y)
        parts.append(f'<text x="{px:.1f}" y="{ay + 14:.1f}" text-anchor="middle" fill="#666">{round(x, 3):g}</text>')
        parts.append(f'<text x="{ax - 5:.1f}" y="{py + 3:.1f}" text-anchor="end" fill="#666">{y:g}</text>')
        parts.append(f'<line x1="{ax:.1f}" y1="{py:.1f}" x2="{bx:.1f}" y2="{py:.1f}" stroke="#eee"/>')
    for colour, values in zip(COLOURS, panel.curves.values(), strict=False):
        inside = values.clamp(panel.low, panel.high)
        points = " ".join("{:.1f},{:.1f}".format(*at(float(x), float(y))) for x, y in zip(panel.x, inside, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return "\n".join(parts)


def draw(name: str, panels: Sequence[Panel]) -> None:
    """Writes ``name``.svg: panels side by side over one legend."""
    total = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + LEGEND}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{total}" height="{HEIGHT + LEGEND}" fill="white"/>',
        *(panel_svg(panel, WIDTH * i) for i, panel in enumerate(panels)),
    ]
    step = total / len(panels[0].curves)
    for i, curve in enumerate(panels[0].curves):
        left, y = step * i + 14, HEIGHT + 8
        parts.append(
            f'<line x1="{left:.0f}" y1="{y}" x2="{left + 18:.0f}" y2="{y}" stroke="{COLOURS[i]}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{left + 23:.0f}" y="{y + 4}">{curve}</text>')
    (HERE / f"{name}.svg").write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def policy(name: str, ratio: Tensor, advantage: float, **settings: float) -> tuple[Tensor, Tensor]:
    """Loss of one-token sequences with the given ratios, and minus its slope by log pi: how hard it pushes."""
    count = ratio.numel()
    log_probs = (ratio.log() - 2.0).requires_grad_()
    inputs = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=torch.full((count,), -2.0, dtype=ratio.dtype),
        advantages=torch.full((count,), advantage, dtype=ratio.dtype),
        mask=torch.ones(count, dtype=torch.bool),
        segments=Segments.from_lengths([1] * count),
    )
    loss = policy_losses[name](inputs, **settings).per_token
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.detach(), -slope


def losses_against_ratio() -> None:
    ratio = torch.linspace(0.0, 4.0, 161, dtype=torch.float64).clamp(min=1e-9)
    shown: dict[str, tuple[str, dict[str, float]]] = {
        "ppoClip": ("ppoClip", {}),
        "ppoClip, dual clip 3": ("ppoClip", {"dual_clip": 3.0}),
        "ppoClip, clip 0.2/0.28": ("ppoClip", {"clip_high": 0.28}),
        "sapo": ("sapo", {}),
        "gmpo": ("gmpo", {}),
    }
    panels = []
    for advantage, low, high in ((1.0, -4.0, 0.0), (-1.0, 0.0, 4.0)):
        curves = {title: policy(name, ratio, advantage, **s)[0] for title, (name, s) in shown.items()}
        panels.append(Panel(f"A = {advantage:+g}", "pi_theta / pi_old", "loss", ratio, curves, low, high))
    draw("loss-against-ratio", panels)


def push_against_ratio() -> None:
    ratio = torch.linspace(0.0, 4.0, 161, dtype=torch.float64).clamp(min=1e-9)
    shown: dict[str, tuple[str, dict[str, float]]] = {
        "ppoClip": ("ppoClip", {"dual_clip": 3.0}),
        "cispo, up to 1.5": ("cispo", {"clip_high": 0.5}),
        "tis, cap 2": ("tis", {}),
        "sapo": ("sapo", {}),
        "dppoKl": ("dppoKl", {}),
        "reinforce": ("reinforce", {}),
    }
    panels = []
    for advantage, low, high in ((1.0, 0.0, 4.0), (-1.0, -4.0, 0.0)):
        curves = {title: policy(name, ratio, advantage, **s)[1] for title, (name, s) in shown.items()}
        panels.append(Panel(f"A = {advantage:+g}", "pi_theta / pi_old", "push on log pi", ratio, curves, low, high))
    draw("push-against-ratio", panels)


def weights_against_ratio() -> None:
    ratio = torch.linspace(0.0, 6.0, 301, dtype=torch.float64)
    curves = {
        "as it is": ratio,
        "high 2": within_bounds(ratio, None, 2.0),
        "low 0.5, high 5": within_bounds(ratio, 0.5, 5.0),
    }
    draw("weights", [Panel("Importance weights", "pi_old / pi_roll", "weight", ratio, curves, 0.0, 6.0)])


def kl_estimates() -> None:
    d = torch.linspace(-2.0, 2.0, 121, dtype=torch.float64)
    kinds = ["k1", "abs", "k2", "k3", "k3Straight"]

    def value_and_slope(kind: str) -> tuple[Tensor, Tensor]:
        x = d.clone().requires_grad_()
        value = kl_estimators[kind](x, torch.zeros_like(x))
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    both = {kind: value_and_slope(kind) for kind in kinds}
    across = "d = log pi_theta - log pi_ref"
    draw(
        "kl",
        [
            Panel("Value", across, "estimate", d, {k: v for k, (v, _) in both.items()}, -2.0, 4.0),
            Panel("Gradient", across, "slope by log pi", d, {k: s for k, (_, s) in both.items()}, -6.0, 2.0),
        ],
    )


FIGURES: list[Callable[[], None]] = [losses_against_ratio, push_against_ratio, weights_against_ratio, kl_estimates]

if __name__ == "__main__":
    for figure in FIGURES:
        figure()

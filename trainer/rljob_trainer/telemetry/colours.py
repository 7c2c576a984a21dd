"""The colours of all figures: eight for curves, and for each stage of a run one that it has everywhere.

A colour is a CSS class that sets ``--c``; ``theme`` writes the classes for light and dark pages. Terminals show the
light one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """The same colour on a light and on a dark page."""

    light: str
    dark: str


CURVES = (
    Colour("#2f6fdb", "#79a8ff"),
    Colour("#d9730d", "#f2a65a"),
    Colour("#0f8f66", "#56c79c"),
    Colour("#8a4fd0", "#bd98f5"),
    Colour("#cf3f53", "#f48493"),
    Colour("#8491a5", "#7f8da1"),
    Colour("#1495a6", "#4fc3d3"),
    Colour("#a68a00", "#d9bf4b"),
)
"""Of curves, in this order: the classes ``s0`` to ``s7``."""

STAGE_COLOURS = {
    # waits for samples
    "generate": Colour("#2f6fdb", "#79a8ff"),
    "wait_prev_gen": Colour("#2a2f8f", "#7468f0"),
    "idle": Colour("#5d6b2f", "#a3ad62"),
    # scores and forward passes before the update
    "reward": Colour("#d9730d", "#f2a65a"),
    "score": Colour("#8a4fd0", "#bd98f5"),
    "old_log_probs": Colour("#b13fae", "#d96fd6"),
    "reference": Colour("#5b2a86", "#9468c9"),
    "values": Colour("#d6589a", "#ff9ccb"),
    "advantage": Colour("#a68a00", "#d9bf4b"),
    # the update
    "update": Colour("#075c41", "#2f9a73"),
    "update_actor": Colour("#0f8f66", "#56c79c"),
    "update_critic": Colour("#1495a6", "#4fc3d3"),
    # everything else
    "publish": Colour("#cf3f53", "#f48493"),
    "validation": Colour("#639a0c", "#b5dd5f"),
    "checkpoint": Colour("#8a5a33", "#c79468"),
    "start": Colour("#4b5563", "#c3cbd6"),
    "other": Colour("#8491a5", "#7f8da1"),
}

SAMPLING_COLOURS = (Colour("#9dbdf2", "#35558f"), Colour("#6f9be6", "#4a72bb"))
"""Of an engine's sampling, in the blues of ``generate``: under even versions, and under odd ones."""


def stage_class(stage: str) -> str:
    """The class of a stage's colour; what is no stage looks like ``other``."""
    return f"stage-{stage if stage in STAGE_COLOURS else 'other'}"


CLASSES = {
    **{f"s{number}": colour for number, colour in enumerate(CURVES)},
    **{stage_class(stage): colour for stage, colour in STAGE_COLOURS.items()},
    **{f"sampling-{number}": colour for number, colour in enumerate(SAMPLING_COLOURS)},
}


def theme(root: str, classes: Iterable[str] = CLASSES) -> str:
    """CSS: text, lines and the ``classes`` as variables of ``root``, which follow the reader's theme."""
    used = [*dict.fromkeys(classes)]
    light = "--ink: #1d2430; --soft: #667085; --line: #e3e7ee; --card: #fff;"
    dark = "--ink: #e6e9ef; --soft: #98a2b3; --line: #2a313d; --card: #181e27;"
    return "\n".join(_rules(root, used, light, dark))


def _rules(root: str, used: list[str], light: str, dark: str) -> Iterator[str]:
    yield f"{root} {{ {light} {' '.join(f'--{name}: {CLASSES[name].light};' for name in used)} }}"
    yield f"@media (prefers-color-scheme: dark) {{ {root} {{ {dark}"
    yield f"  {' '.join(f'--{name}: {CLASSES[name].dark};' for name in used)} }} }}"
    yield " ".join(f".{name} {{ --c: var(--{name}); }}" for name in used)

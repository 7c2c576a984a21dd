"""What both sides are given, and what they give back. Standard library only: the peers' environments import it too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.measuring import Step

PATTERN = r"\d"
"""The reward of both sides: 1 if a digit occurs. It costs nothing, and no group learns its way out of the setting."""

KL_COEFFICIENT = 0.05
LAMBDA = 0.95


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison: algorithm, batch and lengths."""

    algorithm: Literal["grpo", "ppo"]
    sequences: int
    """Responses per step."""
    steps: int
    warm_up: int
    """First steps that are not counted."""
    response_tokens: int = 64
    learning_rate: float = 1e-6
    seed: int = 1

    @property
    def samples_per_prompt(self) -> int:
        return 8 if self.algorithm == "grpo" else 1

    @property
    def epochs(self) -> int:
        """Passes over a batch: TRL's defaults, 1 for GRPO and 4 for PPO; one optimizer step each."""
        return 1 if self.algorithm == "grpo" else 4

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.sequences}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        return cls(**json.loads(text))


def write_steps(path: Path, steps: Sequence[Step]) -> None:
    path.write_text(json.dumps([asdict(step) for step in steps]))


def read_steps(path: Path) -> list[Step]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return [Step(**row) for row in rows]

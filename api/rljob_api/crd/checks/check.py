"""What a CEL validation is, and the places where validations stand."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.crd.structural import Path


@dataclass(frozen=True)
class Check:
    """One CEL validation: which rule it expresses, where it stands, and the field that it blames."""

    rule: str
    at: Path
    expression: str
    message: str
    field: str = ""
    """Relative to ``at``, with a leading point; empty: ``at`` itself."""


ROOT: Path = ()
SPEC: Path = ("spec",)
MODEL: Path = ("spec", "model")
RANDOM: Path = (*MODEL, "random")
DATA: Path = ("spec", "data")
TRAIN: Path = ("spec", "data", "train")
VALIDATION: Path = ("spec", "data", "validation", "[]")
REWARD: Path = ("spec", "reward")
FUNCTION: Path = (*REWARD, "functions", "[]")
ALGORITHM: Path = ("spec", "algorithm")
CORRECTION: Path = (*ALGORITHM, "rolloutCorrection")
TRAINER: Path = ("spec", "trainer")
PODS: tuple[Path, ...] = (("spec", "rollout", "pod"), ("spec", "trainer", "pod"), ("spec", "head", "pod"))


def exactly_one(*fields: str) -> str:
    listed = ", ".join(f"has({field})" for field in fields)
    return f"[{listed}].filter(x, x).size() == 1"

"""What is wrong with a job: a path, the problem, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Violation:
    """One thing that is wrong. ``path`` is as Kubernetes writes it: ``spec.reward.functions[0].type``."""

    path: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.remedy}"

    @property
    def parts(self) -> tuple[str | int, ...]:
        """The path taken apart: ``("spec", "reward", "functions", 0, "type")``."""
        found = re.findall(r"([^.\[\]]+)|\[([^\[\]]+)\]", self.path)
        return tuple(int(key) if key.isdigit() else word or key for word, key in found)


class JobInvalid(ValueError):  # noqa: N818 - reads as the sentence it is
    """A job file is not valid. Carries every violation found."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations: Sequence[Violation] = tuple(violations)
        super().__init__("\n".join(map(str, self.violations)))


def path_of(parts: Iterable[str | int]) -> str:
    """``("spec", "env", 0)`` -> ``spec.env[0]``; keys that are not plain words stand in brackets."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum():
            path += f".{part}" if path else part
        else:
            path += f"[{part}]"
    return path


def touches(path: str, others: Iterable[str]) -> bool:
    """Whether a path is at, above or below one of the others."""
    return any(_is_within(path, other) or _is_within(other, path) for other in others)


def speaks_of(violation: Violation, hidden: Collection[str]) -> bool:
    """Whether a sentence names one of the fields whose value is not known: it is then about a default or a stand-in.

    A field is named as texts do it: by its path, with or without ``spec.``, or from a section that both are in.
    """
    # Of a list with a wrong item nothing is known.
    unknown = {path[: end.start()] for path in hidden for end in re.finditer(r"\[|$", path)}
    above = [violation.path[: end.start()] for end in re.finditer(r"[.\[]", violation.path)]
    named = re.findall(r"[A-Za-z]+(?:\[\d+\])?(?:\.[A-Za-z]+(?:\[\d+\])?)*", f"{violation.problem} {violation.remedy}")
    paths = {path for name in named for path in (name, *(f"{section}.{name}" for section in above))}
    return any(_is_within(path, other) for path in paths for other in unknown)


def _is_within(path: str, other: str) -> bool:
    """Whether a path is at or below another: `spec.rollout.environment` is not below `spec.rollout.env`."""
    return path.startswith(other) and path[len(other) : len(other) + 1] in ("", ".", "[")

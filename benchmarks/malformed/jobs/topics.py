"""What a fault is about, by what was done where: the kinds of disagreement that were found by hand, and others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.malformed.jobs.mistakes import Mistake

TOPICS: Sequence[tuple[str, str, str]] = (
    ("a null where a value stands", "null", ""),
    ("a volume twice", "twice in a list", r"(^|\.)volumes\.\d+$"),
    ("a mount twice", "twice in a list|another text|text of another field", r"volumeMounts\.\d+(\.mountPath)?$"),
    ("a bad regular expression", "", r"\.pattern$"),
    ("columns that a task lacks", "", r"^data\.(prompt|answer)$"),
    ("requests above limits", "", r"resources\.(requests|limits)"),
    ("a bad subPath", "", r"\.subPath(Expr)?$"),
    ("a bad fieldRef", "", r"fieldRef"),
    ("a bad affinity", "", r"[aA]ffinity"),
    ("a bad spread", "", r"topologySpreadConstraints"),
    ("code outside its volume", "", r"^code\.\d+\.path$"),
    ("unknown fields of a template", "unknown field", r"\.template"),
    ("an image that is no reference", "", r"(^|\.)(image|reference)$"),
)
"""Name, kinds of mistakes, and places; the first that fits counts. A mount at the root is told by its value."""


def topic(mistake: Mistake) -> str:
    """The kind of disagreement that a mistake led to."""
    path = ".".join(map(str, mistake.path))
    if path.endswith(".mountPath") and mistake.value == "/":
        return "a mount at the root"
    for name, kinds, places in TOPICS:
        if (not kinds or mistake.kind in kinds.split("|")) and re.search(places, path):
            return name
    return "others"

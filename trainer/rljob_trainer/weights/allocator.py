"""Where torch's allocator for GPUs is told its settings. Standard library only."""

from __future__ import annotations

import os

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch reads them from; the first that is set counts."""
EXPANDABLE = "expandable_segments:True"


def settings() -> str:
    """What it was told in this process's environment."""
    return next((os.environ[name] for name in NAMES if name in os.environ), "")

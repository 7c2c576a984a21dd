"""Makes this folder's own modules (oracles, random batches) importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With RLJOB_DEVIATIONS=1: the largest deviation of every method from its oracle (run without xdist)."""
    if os.environ.get("RLJOB_DEVIATIONS"):
        from ragged import deviations

        for (name, precision), largest in sorted(deviations.items()):
            terminalreporter.write_line(f"{name:55s} {precision:8s} {largest:.1e}")

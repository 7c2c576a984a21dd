"""How much longer everything takes than on an idle machine: what deadlines of tests are multiplied by."""

from __future__ import annotations

import os


def crowding() -> float:
    """How many processes want each processor, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

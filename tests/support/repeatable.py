"""The same numbers each time: tests draw by chance, but what they draw follows from their names alone.

`make everything` sets ``RLJOB_SEED``, another one each time, and prints it; then all of this follows from that number,
too, and Hypothesis looks for examples anew.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

SEED = "RLJOB_SEED"


def set_up_hypothesis() -> None:
    """One profile for all tests. Without what Hypothesis takes from the constants of local modules: which of them are
    loaded depends on the tests that the process has run before (private, and tests see whether it still helps)."""
    settings.register_profile(
        "rljob",
        deadline=None,
        derandomize=SEED not in os.environ,
        database=None,
        max_examples=25,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("rljob")
    providers._get_local_constants = providers.Constants  # type: ignore[assignment]


def seed(test: str) -> None:
    """Seeds the generators that a test may draw from without saying so, where they are loaded already."""
    number = int.from_bytes(hashlib.sha256(f"{os.environ.get(SEED, '')} {test}".encode()).digest()[:4], "big")
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)

"""A plugin of pytest (``-p first_cases``) that leaves the first case of each of the trainer's parametrised tests.

Cases differ in numbers, models and methods: what they find is the same on every Python, and so is the test's own code.
It is for ``pythons.py``, which looks for what is not. Tests of what reads the users' files (``tests/api``) and answers
the cluster (``tests/operator``) keep all their cases: they take milliseconds, and each runs another rule's code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TRAINER = Path(__file__).resolve().parents[1] / "trainer"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    kept, left = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        again = function in seen and item.path.is_relative_to(TRAINER)
        seen.add(function)
        (left if again else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)

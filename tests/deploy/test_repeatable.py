"""What tests draw by chance is the same each time, whichever tests have run before."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import numpy as np
import pytest
import repeatable
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

RARE = 918273645546372819
"""No number that chance alone would find."""


def drawn() -> set[int]:
    found = set[int]()

    @settings(max_examples=100, database=None)
    @given(st.lists(st.integers(), min_size=40))
    def draw(numbers: list[int]) -> None:
        found.update(numbers)

    draw()
    return found


def test_hypothesis_draws_no_constants_of_modules_that_happen_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would, and an upgrade that calls it by another name is seen by the second half."""
    monkeypatch.setitem(sys.modules, "happens_to_be_loaded", ModuleType("happens_to_be_loaded"))
    assert RARE not in drawn()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: Constants(integers={RARE}))
    providers.CONSTANTS_CACHE.cache.clear()
    assert RARE in drawn()
    providers.CONSTANTS_CACHE.cache.clear()


def test_one_profile_holds_for_all_tests() -> None:
    assert settings.get_current_profile_name() == "rljob"
    assert drawn() == drawn()


def test_what_is_loaded_is_seeded_by_the_name_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(repeatable.SEED, raising=False)

    def numbers(test: str) -> tuple[float, float]:
        repeatable.seed(test)
        return random.random(), float(np.random.random())

    one, other = numbers("tests/a.py::test_a"), numbers("tests/a.py::test_b")
    assert one == numbers("tests/a.py::test_a") != other
    monkeypatch.setenv(repeatable.SEED, "7")
    assert numbers("tests/a.py::test_a") != one
    repeatable.seed("tests/deploy/test_repeatable.py::the_next")


def test_this_test_was_seeded_before_it_began(request: pytest.FixtureRequest) -> None:
    began = random.random()
    repeatable.seed(request.node.nodeid)
    assert random.random() == began

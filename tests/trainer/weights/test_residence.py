"""What is told of two models that ought to be the same."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.residence import PUBLISHED, cause_of, differing, fingerprint, resident, sums_in_any_order

pytestmark = pytest.mark.integrity


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(96, 64, generator=generator) for name in ("a", "b", "c")}


def told(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], former: dict[int, dict[str, int]]) -> str:
    sums = sums_in_any_order(ours.items()), sums_in_any_order(theirs.items())
    return cause_of(sums_of(ours), sums_of(theirs), former, sums)


def sums_of(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    return dict(resident(weights.items()).sums)


def test_equal_weights_differ_in_nothing() -> None:
    assert differing(sums_of(model()), sums_of(model())) == []


def test_what_only_one_has_is_a_difference_but_for_a_tied_matrix() -> None:
    whole = sums_of(model())
    less = {name: number for name, number in whole.items() if name != "b"}
    assert differing(whole, less) == differing(less, whole) == ["b"]
    tied = whole | {"lm_head.weight": whole["a"]}
    assert differing(whole, tied) == differing(tied, whole) == []
    assert differing(tied, whole | {"lm_head.weight": whole["b"]}) == ["lm_head.weight"]
    assert cause_of(whole, less, {}, ({}, {})) == "it has no b"
    assert cause_of(less, whole, {}, ({}, {})) == "it never received b"


def test_weights_of_an_earlier_version_are_recognised() -> None:
    old, new = model(1), model(2)
    assert told(new, old, {6: sums_of(model(3)), 7: sums_of(old)}) == (
        "it still has the weights of version 7: the new ones were not loaded"
    )


def test_one_matrix_that_was_not_loaded_is_recognised() -> None:
    old, new = model(1), model(2)
    assert "version 7 in b" in told(new, new | {"b": old["b"]}, {7: sums_of(old)})


def test_matrices_that_changed_places_are_named_both() -> None:
    ours = model()
    theirs = ours | {"a": ours["b"], "b": ours["a"]}
    assert told(ours, theirs, {}) == "a contains the values of b; b contains the values of a"


def test_rows_that_changed_places_are_told_from_other_numbers() -> None:
    ours = model()
    theirs = ours | {"a": ours["a"].flip(0), "c": ours["c"] + 1}
    assert told(ours, theirs, {}) == "a has the same values in another order; c has different values"


def test_fingerprints_are_compared_within_a_layout_only() -> None:
    one, other = manifest_of(model().items()), manifest_of((model() | {"b": torch.ones(3)}).items())
    pair = fingerprint([one, one])
    assert pair.layout not in (PUBLISHED, fingerprint([one]).layout, fingerprint([one, other]).layout)
    changed = fingerprint([one, manifest_of((model() | {"b": torch.zeros(96, 64)}).items())])
    assert changed.layout == pair.layout
    assert differing(pair.sums, changed.sums) == ["worker 1: b"]
    assert resident(model().items()).layout == PUBLISHED

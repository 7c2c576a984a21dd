"""The manifest of a version: its text, its identity, what makes two of them differ."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError

import pytest
import torch

from rljob_trainer.weights.manifest import Addition, Manifest, Version, added_up, manifest_of
from rljob_trainer.weights.plan import TensorMeta

pytestmark = pytest.mark.integrity


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(96, 64, generator=generator) for name in ("b", "a", "c")}


def test_the_text_is_one_line_for_each_tensor_by_name_and_the_identity_its_sha256() -> None:
    manifest = Manifest(
        [(TensorMeta("norm", (3,), torch.bfloat16), 255), (TensorMeta("embed", (2, 4), torch.float32), 2**64 - 1)]
    )
    text = '["embed", [2, 4], "float32", "ffffffffffffffff"]\n["norm", [3], "bfloat16", "00000000000000ff"]\n'
    assert manifest.text == text
    assert manifest.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert manifest.version(7) == Version(7, manifest.sha256)
    assert str(Version(7, "0123456789abcdef")) == "version 7 (manifest 0123456789ab)"
    with pytest.raises(FrozenInstanceError):
        Version(7, "ab").number = 8  # type: ignore[misc]


def test_the_order_in_which_tensors_come_and_how_many_at_once_are_no_matter() -> None:
    named = list(model().items())
    addition = Addition()
    addition.add(named[2:])
    addition.add([])
    addition.add(named[:2])
    assert addition.manifest() == manifest_of(named) == manifest_of(reversed(named))
    assert addition.manifest().sha256 == manifest_of(named).sha256


def test_name_shape_dtype_and_bytes_are_all_part_of_it() -> None:
    whole = model()
    same = manifest_of(whole.items())
    others = [
        {**whole, "b": whole["b"] + 1},
        {**whole, "b": whole["b"].view(64, 96)},
        {**whole, "b": whole["b"].view(torch.int32)},
        {"d": whole["b"], "a": whole["a"], "c": whole["c"]},
        {"a": whole["a"], "c": whole["c"]},
    ]
    for other in others:
        made = manifest_of(other.items())
        assert made.sha256 != same.sha256
        assert same.differing(made)[0] == "b"
    assert same.differing(manifest_of(model().items())) == []
    # Zeros add nothing up, so that only the shape tells how many there are.
    assert manifest_of([("a", torch.zeros(3))]).sha256 != manifest_of([("a", torch.zeros(4))]).sha256


def test_a_name_comes_once() -> None:
    with pytest.raises(ValueError, match="one line for each name"):
        manifest_of([("a", torch.ones(3)), ("a", torch.ones(3))])


def test_owners_sums_are_added_modulo_2_to_the_64() -> None:
    assert added_up([{"a": 2**64 - 1, "b": 5}, {"a": 3}, {}]) == {"a": 2, "b": 5}

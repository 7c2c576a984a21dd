"""A minimal job, as text and as data, for the tests of the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api import RLJob, check
from rljob_api.yaml_reading import read_documents, read_value

MINIMAL = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: tiny
spec:
  model: {source: org/model}
  data:
    train: {source: train.jsonl}
    prompt: question
    answer: answer
  reward: {functions: [{type: gsm8k}]}
  algorithm: {preset: grpo}
"""


@pytest.fixture
def minimal_text() -> str:
    """The shortest useful job file."""
    return MINIMAL


def merged(data: Any, patch: Any) -> Any:
    """``data`` with ``patch`` laid over it: maps are merged, all else replaced, null removes."""
    if not isinstance(data, dict) or not isinstance(patch, dict):
        return patch
    both = {key: merged(data.get(key), value) for key, value in patch.items()}
    return {key: value for key, value in {**data, **both}.items() if value is not None}


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    """``document("spec: {...}")``: the minimal job as data, with YAML laid over it."""

    def make(*patches: str) -> dict[str, Any]:
        data: dict[str, Any] = read_documents(MINIMAL)[0].data
        for patch in patches:
            data = merged(data, read_value(patch))
        return data

    return make


@pytest.fixture
def job(document: Callable[..., dict[str, Any]]) -> Callable[..., RLJob]:
    """``job("spec: {...}")``: a valid job; fails the test when it is not valid."""

    def make(*patches: str) -> RLJob:
        made, violations = check(document(*patches))
        assert violations == []
        assert made is not None
        return made

    return make

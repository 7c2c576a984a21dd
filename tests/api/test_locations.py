"""The list of fields that name places is whole, and finds them in a job that is a model and in one that is plain."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rljob_api import resolve
from rljob_api.loading import load_jobs
from rljob_api.locations import READ, STATE, locations, place_in_schema
from rljob_api.schema import find, walk
from rljob_api.spec.base import Location

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {source: pvc://claim/model, tokenizer: other}
  data:
    train: {parts: [{name: a, source: a.jsonl}, {name: b, source: b.jsonl}]}
    validation: [{name: held-out, source: held-out.jsonl}]
    prompt: question
    answer: answer
  reward: {functions: [{type: exactMatch}, {type: rewardModel, rewardModel: {source: scores}}]}
  algorithm: {preset: ppo, critic: {model: {source: critic}}}
  checkpoint: {uri: runs}
  restore: {from: earlier}
"""
EXPECTED = {
    "spec.model.source": "pvc://claim/model",
    "spec.model.tokenizer": "other",
    "spec.data.train.parts[0].source": "a.jsonl",
    "spec.data.train.parts[1].source": "b.jsonl",
    "spec.data.validation[0].source": "held-out.jsonl",
    "spec.reward.functions[1].rewardModel.source": "scores",
    "spec.algorithm.critic.model.source": "critic",
    "spec.checkpoint.uri": "runs",
    "spec.restore.from": "earlier",
}


def test_no_field_for_a_location_is_missing() -> None:
    """Their type's bounds tell such fields from nearly all others."""
    (bounds,) = Location.__metadata__  # type: ignore[attr-defined]
    shortest, longest = (
        getattr(bound, name) for bound, name in zip(bounds.metadata, ("min_length", "max_length"), strict=True)
    )
    named = {path for path, node in walk() if (node.kind, node.shortest, node.longest) == ("string", shortest, longest)}
    # Places inside a pod, an expression, and a server that is told and never read from.
    others = {path for path in named if path.endswith((".mountPath", ".subPath", ".pattern", ".mlflow.trackingUri"))}
    assert named - others == {f"spec.{field.replace('[]', '')}" for field in (*READ, *STATE)}


@pytest.mark.parametrize("field", [*READ, *STATE])
def test_the_place_in_the_schema_has_the_field(field: str) -> None:
    way, name = place_in_schema(field)
    assert find((*way, name)) is not None


def test_a_model_and_plain_data_name_the_same_places() -> None:
    (job,) = load_jobs(JOB)
    plain = yaml.safe_load(JOB)["spec"]
    for spec in (job.spec, plain, resolve(job).spec, resolve(job).document()["spec"]):
        found = {place.path: place.value for place in locations(spec, (*READ, *STATE))}
        assert found == EXPECTED


@pytest.mark.parametrize("plain", [{}, {"model": None}, {"model": "text"}, {"data": {"train": {"parts": 3}}}])
def test_what_is_no_job_has_no_places(plain: dict[str, Any]) -> None:
    """An operator may mount a job that a newer version has written."""
    assert list(locations(plain, (*READ, *STATE))) == []


def test_places_are_rewritten_in_plain_data_alone() -> None:
    (job,) = load_jobs(JOB)
    plain = yaml.safe_load(JOB)
    for place in locations(plain["spec"], READ):
        place.rewrite(place.value.upper())
    assert plain["spec"]["data"]["train"]["parts"][1] == {"name": "b", "source": "B.JSONL"}
    assert plain["spec"]["checkpoint"] == {"uri": "runs"}
    (first, *_) = locations(job.spec, READ)
    with pytest.raises(TypeError, match=r"spec\.model\.source is a field of a model"):
        first.rewrite("other")

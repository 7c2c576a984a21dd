"""What the API server says to a change of a field that stays as it was at creation: no, why, and what to do instead."""

from __future__ import annotations

import pytest
from kube.control_plane import ApiCallError
from world import Object, World, job_document

pytestmark = pytest.mark.timeout(400)

NEVER = "cannot be changed after creation; create a new job (restore.from continues from this one's checkpoint)"


@pytest.mark.parametrize("suspend", [False, True], ids=["not-suspended", "suspended"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"model": {"source": "s3://models/other"}}, "spec.model", id="another-model"),
        pytest.param({"model": {"revision": "v2"}}, "spec.model", id="more-about-the-model"),
        pytest.param({"model": {"dtype": None}}, "spec.model", id="less-about-the-model"),
        pytest.param({"algorithm": {"preset": "gspo"}}, "spec.algorithm", id="another-algorithm"),
        pytest.param({"restore": {"from": "/runs/before"}}, "spec.restore", id="added"),
        pytest.param({"placement": None}, "spec.placement", id="removed"),
        pytest.param({"pipeline": {"requireBatches": 1}}, "spec.pipeline.requireBatches", id="added-below"),
        pytest.param({"checkpoint": None}, "spec.checkpoint.uri", id="removed-below"),
    ],
)
async def test_what_never_changes_is_refused(world: World, change: Object, field: str, suspend: bool) -> None:
    document = job_document(
        "fixed",
        model={"dtype": "float32"},
        pipeline={"mode": "fullyAsync"},
        checkpoint={"uri": "/runs/state"},
        suspend=suspend,
    )
    await world.apply(document)
    before = await world.job("fixed")
    with pytest.raises(ApiCallError) as refusal:
        await world.patch("fixed", change)
    assert refusal.value.code == 422
    assert NEVER in refusal.value.answer["message"]
    (cause,) = refusal.value.answer["details"]["causes"]
    assert cause["field"] == field
    assert cause["message"].endswith(NEVER)
    assert await world.job("fixed") == before


@pytest.mark.parametrize(
    ("rollout", "change"),
    [
        pytest.param({}, {"replicas": 2}, id="engines-get-a-pool"),
        pytest.param({"replicas": 2}, {"replicas": None}, id="engines-lose-their-pool"),
    ],
)
async def test_a_placement_that_is_not_given_stays_as_well(world: World, rollout: Object, change: Object) -> None:
    document = job_document("implied")
    del document["spec"]["placement"]
    document["spec"]["rollout"] = rollout
    await world.apply(document)
    with pytest.raises(ApiCallError) as refusal:
        await world.patch("implied", {"rollout": change})
    (cause,) = refusal.value.answer["details"]["causes"]
    assert cause["field"] == "spec.placement"
    assert "depends on rollout.replicas" in cause["message"]


@pytest.mark.parametrize(
    "sections", [{"placement": "separate"}, {"pipeline": {"mode": "fullyAsync"}}], ids=["given", "by-mode"]
)
async def test_replicas_may_be_left_to_others_where_they_decide_nothing(world: World, sections: Object) -> None:
    document = job_document("open")
    del document["spec"]["placement"]
    document["spec"] |= {"rollout": {}, **sections}
    await world.apply(document)
    await world.patch("open", {"rollout": {"replicas": 2}})
    await world.patch("open", {"rollout": {"replicas": None}})

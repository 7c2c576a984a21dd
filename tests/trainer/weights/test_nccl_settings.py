"""Members of a weight group that were told different things of NCCL learn it before they wait for its first byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rljob_trainer.errors import EngineError
from rljob_trainer.stores import reach_store, serve_store
from rljob_trainer.weights import group as module
from rljob_trainer.weights.group import CalledOffError, WeightGroup, WeightLink
from rljob_trainer.weights.nccl_settings import difference, told

DEADLINE = 30.0


def named(backend: str) -> tuple[Any, WeightLink]:
    served, address = serve_store("127.0.0.1")
    return served, WeightLink(address, 1, ("the learner", "engine 0", "engine 1"), backend)


def test_all_members_are_told_the_variable_and_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    served, link = named("nccl")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    # Of another pod, which says so by itself.
    there = module.dist.PrefixStore("weights/1", reach_store(link.address))
    there.set("here/2", "{}")
    said = r"NCCL_IB_DISABLE is 1 for the learner but is not set for engine 1: .*trainer\.env and rollout\.env"
    with ThreadPoolExecutor(1) as other:
        joins = other.submit(WeightGroup, link, 1, timeout=DEADLINE)
        with pytest.raises(EngineError, match=rf"^weights: {said}"):
            WeightGroup(link, 0, timeout=DEADLINE, store=served)
        with pytest.raises(CalledOffError, match=said):
            joins.result(DEADLINE)


def test_gloo_does_not_care(monkeypatch: pytest.MonkeyPatch) -> None:
    served, link = named("gloo")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    there = module.dist.PrefixStore("weights/1", reach_store(link.address))
    there.set("here/2", "{}")
    there.set("called off", "that was all")
    with pytest.raises(CalledOffError, match="that was all"):
        WeightGroup(link, 1, timeout=DEADLINE, store=served)
    assert there.get("here/1").decode() == "{}"


@pytest.mark.parametrize(
    ("ours", "theirs", "unequal"),
    [
        ({}, {}, None),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO"}, None),
        ({"NCCL_P2P_DISABLE": "0"}, {"NCCL_P2P_DISABLE": ""}, None),
        ({"NCCL_CUMEM_ENABLE": "0"}, {}, "NCCL_CUMEM_ENABLE is 0 for a but is not set for b"),
        ({"NCCL_NET": "IB"}, {"NCCL_NET": "AWS Libfabric"}, "NCCL_NET is IB for a but is AWS Libfabric for b"),
    ],
)
def test_what_may_differ_from_host_to_host_may(
    ours: dict[str, str], theirs: dict[str, str], unequal: str | None
) -> None:
    found = difference(told(ours), "a", {"b": told(theirs)})
    assert found is None if unequal is None else found is not None and found.startswith(unequal)

"""Where ranks live: one bundle of a Ray placement group each, with room for the engine that shares its device.

Without one Ray puts two halves of a device side by side as it likes: two ranks on one GPU ("Duplicate GPU detected"
says NCCL), and an engine beside another rank than the one that it takes turns with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True, slots=True)
class Bundles:
    """What was reserved. Ranks that follow one another share a node, and so do those of a shard group, as far as a
    node's devices go."""

    group: Any
    order: tuple[int, ...]
    """The bundle of each rank."""

    def options(self, rank: int) -> dict[str, Any]:
        """Ray's options of an actor that lives where this rank lives."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.order[rank]
            )
        }

    def free(self) -> None:
        """Gives everything back; actors inside are ended."""
        if ray.is_initialized():
            remove_placement_group(self.group)


async def reserve(
    ranks: int, each: Mapping[str, float], seconds: float, selector: Mapping[str, str] | None = None
) -> Bundles | None:
    """A bundle of ``each`` for every rank, on as few nodes as can be. None when the cluster has no room in time.

    ``selector``: labels of the nodes that may be used.
    """
    selectors = [dict(selector) for _ in range(ranks)] if selector else None
    group = placement_group([dict(each) for _ in range(ranks)], strategy="PACK", bundle_label_selector=selectors)
    try:
        there = await asyncio.to_thread(group.wait, max(1.0, seconds))
    except BaseException:
        remove_placement_group(group)
        raise
    if not there:
        remove_placement_group(group)
        return None
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    return Bundles(group, tuple(sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))))

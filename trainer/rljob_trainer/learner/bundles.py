"""Where ranks live: bundles of a Ray placement group, each with room for the engine that shares its devices.

An engine takes all devices of one bundle, and as many ranks live there, one a device. Without bundles Ray puts shares
of a device side by side as it likes: two ranks on one GPU ("Duplicate GPU detected" says NCCL), and an engine beside
other ranks than those that it takes turns with.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_trainer.aside import aside


@dataclass(frozen=True, slots=True)
class Bundles:
    """What was reserved. Ranks that follow one another share a node, and so do those of a shard group, as far as a
    node's devices go."""

    group: Any
    order: tuple[int, ...]
    """The bundle of each rank."""
    devices: tuple[str, ...] = ()
    """The GPU of each rank, as CUDA_VISIBLE_DEVICES names it on its node; known once the ranks are there."""

    def options(self, rank: int) -> dict[str, Any]:
        """Ray's options of an actor that lives where this rank lives."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.order[rank]
            )
        }

    def free(self) -> None:
        """Gives everything back; actors inside are ended."""
        _remove(self.group)


def _remove(group: Any) -> None:
    """In a thread that nobody waits for: without its head Ray does not answer, and then the group has gone with it."""

    def remove() -> None:
        if ray.is_initialized():
            remove_placement_group(group)

    threading.Thread(target=remove, name="bundles", daemon=True).start()


async def reserve(
    ranks: int,
    each: Mapping[str, float],
    seconds: float,
    selector: Mapping[str, str] | None = None,
    *,
    together: int = 1,
) -> Bundles | None:
    """A bundle of ``each`` for every ``together`` ranks, on as few nodes as can be; what is in one bundle is on one
    node. None when the cluster has no room in time.

    ``selector``: labels of the nodes that may be used.
    """
    count = ranks // together
    selectors = [dict(selector) for _ in range(count)] if selector else None
    bundles = [dict(each) for _ in range(count)]
    # Ray asks its head each time, which may be gone: never on the event loop.
    group = await aside(lambda: placement_group(bundles, strategy="PACK", bundle_label_selector=selectors))
    try:
        there = await aside(lambda: group.wait(max(1.0, seconds)))
    except BaseException:
        _remove(group)
        raise
    if not there:
        _remove(group)
        return None
    nodes: dict[int, str] = (await aside(lambda: placement_group_table(group)))["bundles_to_node_id"]
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    by_node = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
    return Bundles(group, tuple(bundle for bundle in by_node for _ in range(together)))

"""Where ranks live: one bundle of a Ray placement group each, with room for the engine that shares its device.

Without one Ray puts two halves of a device side by side as it likes: two ranks on one GPU ("Duplicate GPU detected"
says NCCL), and an engine beside another rank than the one that it takes turns with.
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
    ranks: int, each: Mapping[str, float], seconds: float, selector: Mapping[str, str] | None = None
) -> Bundles | None:
    """A bundle of ``each`` for every rank, on as few nodes as can be. None when the cluster has no room in time.

    ``selector``: labels of the nodes that may be used.
    """
    selectors = [dict(selector) for _ in range(ranks)] if selector else None
    bundles = [dict(each) for _ in range(ranks)]
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
    return Bundles(group, tuple(sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))))

"""Events tell what happened, once, and leave out what is normal."""

from __future__ import annotations

from simulation import World


def test_a_life_reads_like_a_story() -> None:
    world = World()
    told = []
    for _ in range(8):
        told += [(event.kind, event.reason) for event in world.look().events]
        world.kuberay()
        world.kubelet()
        world.drive()
        world.wait(5)
    world.end(world.drivers[0], "succeeded", 0)
    told += [(event.kind, event.reason) for event in world.look().events]
    assert {kind for kind, _ in told} == {"Normal"}
    assert [reason for _, reason in told] == ["PoolsReady", "Starting", "Training", "ClusterFreed", "Completed"]


def test_troubles_are_warnings_and_said_once() -> None:
    world = World()
    world.settle(8)
    world.reachable = False
    events = [world.look().events for _ in range(3)]
    assert [(event.kind, event.reason) for event in events[0]] == [
        ("Warning", "RayUnreachable"),
        ("Warning", "NoAnswer"),
    ]
    assert events[1:] == [(), ()]

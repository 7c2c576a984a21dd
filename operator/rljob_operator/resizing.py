"""Making pools bigger or smaller while the job runs, without losing a sample. Pure.

Bigger: more pods at once; the driver takes the new replicas when they are there. Smaller: the driver is told first,
drains the surplus, and names the pods that may go; exactly those are removed. KubeRay would otherwise take any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rljob_api.status import DriverStatus, ReplicaStatus
from rljob_operator.actions import ClearRemoved, ReshapeGroup, ResizeGroup
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.names import JUDGE, ROLLOUT
from rljob_operator.observed import ClusterView, GroupView, PodView
from rljob_operator.pools import WorkerGroup

_JOINED = "; "
"""Between what is said of several pools."""


@dataclass(frozen=True)
class GroupStanding:
    """How one pool stands to its size."""

    reason: Reason
    sentence: str = ""
    """With the pool's name; empty at its size."""
    shrinks: bool = False
    """Whether more replicas are asked for than the pool shall have."""


def tell(draft: Draft, pools: Sequence[GroupStanding]) -> None:
    """Says how the pools stand to their sizes, in one condition: in the word of that which has most to do."""
    order = (Reason.DRAINING, Reason.REMOVING, Reason.ADDING)
    changing = sorted((pool for pool in pools if pool.reason in order), key=lambda pool: order.index(pool.reason))
    if not any(pool.shrinks for pool in changing):
        draft.set(resize_time=None)
    if changing:
        draft.say(Type.RESIZING, True, changing[0].reason, _JOINED.join(pool.sentence for pool in changing))
    elif pools:
        draft.say(Type.RESIZING, False, Reason.AT_SIZE)


def resize(
    draft: Draft, cluster: ClusterView, pool: WorkerGroup, driver: DriverStatus | None, running: bool
) -> GroupStanding | None:
    """Brings one worker group to its size, and returns how it stands; None where the cluster has no such group.

    Args:
        driver: the running driver's answer to the present generation, or None as long as it hasn't given one.
        running: whether a driver is or may be at work, so that pods mustn't simply be removed.
    """
    group = cluster.group(pool.name)
    if group is None:
        return None
    pods = [pod for pod in draft.observed.pods_of(cluster.name, pool.name) if not pod.ended]
    here = {pod.name for pod in pods}
    if group.removing and here.isdisjoint(group.removing):
        draft.do(ClearRemoved(cluster.name, group.index, group.name, group.replicas))
    if pool.replicas == group.asked:
        if (group.least, group.most) != (pool.lower_bound, max(pool.most, pool.replicas)):
            draft.do(_sized(cluster, pool, group, pool.replicas, group.removing))
        alive = [pod for pod in pods if pod.deleting_since is None]
        surplus = len(alive) - pool.replicas * pool.hosts
        if surplus > 0:
            draft.wake_in(draft.settings.poll_seconds)
            return GroupStanding(Reason.REMOVING, f"{pool.name}: {surplus} pod{'' if surplus == 1 else 's'} to remove")
        if sum(pod.ready for pod in alive) < pool.replicas * pool.hosts and _was_adding(draft, pool):
            return GroupStanding(Reason.ADDING, f"{pool.name}: scaling to {pool.replicas}")
        return GroupStanding(Reason.AT_SIZE)
    if pool.replicas > group.asked:
        draft.do(_sized(cluster, pool, group, pool.replicas))
        return GroupStanding(Reason.ADDING, f"{pool.name}: from {group.asked} to {pool.replicas}")
    return _shrink(draft, cluster, pool, group, pods, driver, running)


def _was_adding(draft: Draft, pool: WorkerGroup) -> bool:
    """Whether the condition that stands says that pods of this pool are being added."""
    said = draft.status.by_type.get(Type.RESIZING.title)
    if said is None or said.reason != Reason.ADDING.title:
        return False
    return any(part.startswith(f"{pool.name}:") for part in said.message.split(_JOINED))


def reshape(draft: Draft, cluster: ClusterView, pool: WorkerGroup) -> bool:
    """Has a group put back whose replicas were given another number of pods by hand, or that was switched off.

    Sizes are looked at when that is done: until then KubeRay makes and removes pods of its own accord.
    """
    group = cluster.group(pool.name)
    if group is None or (group.hosts == pool.hosts and not group.suspended):
        return False
    draft.do(ReshapeGroup(cluster.name, group.index, group.name, group.replicas, pool.hosts))
    draft.wake_in(draft.settings.start_poll_seconds)
    return True


def restore(draft: Draft, cluster: ClusterView, pool: WorkerGroup) -> None:
    """Brings a group that never changes back to its size, if somebody has changed that, or its bounds, by hand.

    Of surplus pods the youngest go: those before them are part of what runs.
    """
    group = cluster.group(pool.name)
    if group is None:
        return
    pods = [pod for pod in draft.observed.pods_of(cluster.name, pool.name) if not pod.ended]
    here = {pod.name for pod in pods}
    if (group.replicas, group.least, group.most) == (pool.replicas, pool.lower_bound, pool.most):
        if group.removing and here.isdisjoint(group.removing):
            draft.do(ClearRemoved(cluster.name, group.index, group.name, group.replicas))
        return
    replicas = _replicas([pod for pod in pods if pod.deleting_since is None and pod.name not in group.removing])
    if len(replicas) < group.asked and group.asked > pool.replicas and not _all_seen(draft):
        # Fewer replicas without a name, and KubeRay would take any: also of those that run. The youngest will be seen,
        # unless something keeps KubeRay from making them, a quota for example.
        draft.wake_in(draft.settings.start_poll_seconds)
        return
    victims = sorted(replicas, key=lambda replica: min(pod.created for pod in replica))[pool.replicas :]
    names = tuple(sorted(pod.name for replica in victims for pod in replica))
    draft.do(_sized(cluster, pool, group, pool.replicas, names))
    draft.wake_in(draft.settings.start_poll_seconds)


def _sized(
    cluster: ClusterView, pool: WorkerGroup, group: GroupView, replicas: int, removing: tuple[str, ...] = ()
) -> ResizeGroup:
    """The change of a group to this many replicas, within the pool's own bounds as far as these allow it."""
    most = max(pool.most, replicas)
    return ResizeGroup(
        cluster.name, group.index, group.name, group.replicas, replicas, pool.lower_bound, most, removing
    )


def _all_seen(draft: Draft) -> bool:
    """Whether pods that KubeRay has made for the group's present size would have been seen by now."""
    since = draft.observed.sized_since
    return since is not None and draft.now >= since + timedelta(seconds=draft.settings.unseen_seconds)


def _shrink(
    draft: Draft,
    cluster: ClusterView,
    pool: WorkerGroup,
    group: GroupView,
    pods: Sequence[PodView],
    driver: DriverStatus | None,
    running: bool,
) -> GroupStanding:
    started = draft.status.resize_time or draft.now
    deadline = started + timedelta(seconds=draft.settings.drain_grace_seconds)
    draft.set(resize_time=started)
    surplus = group.asked - pool.replicas
    replicas = _replicas([pod for pod in pods if pod.deleting_since is None and pod.name not in group.removing])
    if not running or draft.now >= deadline:
        victims = _least_useful_first(replicas)[:surplus]
        leaving = surplus
    else:
        victims = _drained(replicas, None if driver is None else _told_of(driver, pool), pool.replicas)[:surplus]
        # A replica without pods is nothing that could be drained. But pods that KubeRay has just made may not have been
        # seen yet, and fewer replicas without their names would let it take any: also of those that work.
        seen = draft.now >= started + timedelta(seconds=draft.settings.unseen_seconds)
        unborn = max(0, group.asked - len(replicas) - len(group.removing) // pool.hosts) if seen else 0
        leaving = min(surplus, len(victims) + unborn)
    if leaving:
        names = tuple(sorted(pod.name for replica in victims for pod in replica))
        still_here = tuple(name for name in group.removing if name in {pod.name for pod in pods})
        draft.do(_sized(cluster, pool, group, group.asked - leaving, tuple(sorted({*still_here, *names}))))
        standing = GroupStanding(
            Reason.REMOVING, f"{pool.name}: removing {leaving} of {surplus} surplus replicas", shrinks=True
        )
    else:
        sentence = f"{pool.name}: {surplus} of {group.asked} replicas {'is' if surplus == 1 else 'are'} draining"
        standing = GroupStanding(Reason.DRAINING, sentence, shrinks=True)
    draft.wake_in(draft.settings.start_poll_seconds)
    return standing


Replica = tuple[PodView, ...]


def _replicas(pods: Sequence[PodView]) -> list[Replica]:
    """Pods of the same replica together (several hosts), by name."""
    found: dict[str, list[PodView]] = {}
    for pod in pods:
        found.setdefault(pod.replica or pod.name, []).append(pod)
    return [tuple(found[name]) for name in sorted(found)]


def _least_useful_first(replicas: Sequence[Replica]) -> list[Replica]:
    """Sorts replicas for removal: first those that aren't ready, then the youngest."""
    return sorted(
        replicas,
        key=lambda replica: (
            all(pod.ready for pod in replica),
            -max(pod.created for pod in replica).timestamp(),
            replica[0].name,
        ),
    )


def _told_of(driver: DriverStatus, pool: WorkerGroup) -> Sequence[ReplicaStatus]:
    """What the driver says of the pool's replicas."""
    if pool.name == ROLLOUT:
        return driver.pools.rollout.engines
    scoring = driver.pools.judge if pool.name == JUDGE else driver.pools.reward_model
    return () if scoring is None else scoring.replicas


def _drained(replicas: Sequence[Replica], told: Sequence[ReplicaStatus] | None, wanted: int) -> list[Replica]:
    """Replicas whose removal loses nothing: the driver says so, or nothing ever ran there, or nothing ever will.

    ``told``: what the driver says of them; None as long as it says nothing.
    """
    if told is None:
        return []
    safe = {replica.pod for replica in told if replica.pod and (replica.safe_to_delete or replica.state == "drained")}
    known = {replica.pod for replica in told if replica.pod}
    # A driver that began with fewer replicas than there are pods doesn't know the others.
    complete = len(known - safe) >= wanted
    unused = [r for r in replicas if not any(pod.name in known or (pod.ready and not complete) for pod in r)]
    drained = [r for r in replicas if r not in unused and any(pod.name in safe for pod in r)]
    return [*unused, *drained]

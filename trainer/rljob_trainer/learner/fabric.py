"""Whether ranks on several nodes have more than TCP between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_ADAPTERS = Path("/sys/class/infiniband")
"""InfiniBand, RoCE and EFA adapters alike, where a pod is given them."""


def adapters(folder: Path = _ADAPTERS) -> tuple[str, ...]:
    """Names of the RDMA adapters that this process sees."""
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def missing_fabric(seen: Sequence[tuple[str, tuple[str, ...]]]) -> str | None:
    """What to say of ranks on several hosts of which some see no adapter. ``seen``: host and adapters by rank."""
    hosts = {host for host, _ in seen}
    without = sorted({host for host, names in seen if not names})
    if len(hosts) < 2 or not without:
        return None
    return (
        f"the trainer's {len(seen)} ranks are on {len(hosts)} hosts, but no RDMA adapter is visible on "
        f"{', '.join(without)}: NCCL uses TCP there, many times slower than InfiniBand or RoCE. If the nodes have "
        "adapters, request them in trainer.pod.resources (docs/real-cluster.md)"
    )

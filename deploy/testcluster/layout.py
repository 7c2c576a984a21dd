"""Where a cluster's files lie, and which addresses its nodes have. Plain data that every process of it reads."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from testcluster.programs import Programs

HUB_ADDRESS = "10.89.0.1"
NODE_NETWORK = "10.89.0.0/24"
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
API_PORT = 6443
CONTROL_PLANE = "control"
MOST_WORKERS = 9


@dataclass(frozen=True)
class ClusterNode:
    """One node: the control plane has index 0, workers follow."""

    name: str
    index: int
    folder: Path

    @property
    def address(self) -> str:
        return f"10.89.0.{10 + self.index}"

    @property
    def pods(self) -> str:
        """The addresses of its pods."""
        return f"10.244.{self.index}.0/24"

    @property
    def is_control_plane(self) -> bool:
        return self.index == 0

    @property
    def socket(self) -> Path:
        """Where its first process takes requests."""
        return self.folder / "control.sock"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def ready(self) -> Path:
        """There once all its programs have been started."""
        return self.folder / "started"


@dataclass(frozen=True)
class Cluster:
    """A cluster's folder, and what was decided when it was started."""

    folder: Path
    workers: int
    api_port: int
    """On the host's loopback."""
    programs: Programs = field(repr=False)
    images: tuple[Path, ...] = ()
    """Archives that every node imports when it starts."""
    packaged: bool = False
    """Jobs start from the trainer's image; else from a small one, and mount the checkout with its environment."""

    @property
    def nodes(self) -> list[ClusterNode]:
        names = [CONTROL_PLANE, *(f"worker{number}" for number in range(1, self.workers + 1))]
        return [ClusterNode(name, index, self.folder / "nodes" / name) for index, name in enumerate(names)]

    def node(self, name: str) -> ClusterNode:
        """
        Raises:
            KeyError: no node has that name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"there is no node {name}; there are {', '.join(node.name for node in self.nodes)}")

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator, by way of the host's loopback."""
        return self.folder / "kubeconfig"

    @property
    def socket(self) -> Path:
        """Where the hub takes requests."""
        return self.folder / "hub.sock"

    @property
    def shared(self) -> Path:
        """A folder that every node sees, for volumes that many pods write to."""
        return self.folder / "shared"

    @property
    def cgroup(self) -> str:
        """The parent of all its control groups, in every hierarchy."""
        return "rljob-" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]

    @property
    def node_root(self) -> Path:
        """Root of the Debian packages that the nodes' programs come from."""
        assert self.programs.debian is not None, "layout.Cluster is made of programs found with cluster=True"
        return self.programs.debian

    def save(self) -> None:
        programs = {
            "paths": {name: str(path) for name, path in self.programs.paths.items()},
            "crds": [str(path) for path in self.programs.crds],
            "roles": [str(path) for path in self.programs.roles],
            "debian": str(self.programs.debian),
        }
        images = [str(path) for path in self.images]
        record = {
            "workers": self.workers,
            "apiPort": self.api_port,
            "images": images,
            "packaged": self.packaged,
            "programs": programs,
        }
        (self.folder / "cluster.json").write_text(json.dumps(record, indent=2))


def load(folder: Path) -> Cluster:
    """The cluster that was last started in a folder.

    Raises:
        FileNotFoundError: none was.
    """
    record = json.loads((folder / "cluster.json").read_text())
    said = record["programs"]
    programs = Programs(
        {name: Path(path) for name, path in said["paths"].items()},
        tuple(Path(path) for path in said["crds"]),
        tuple(Path(path) for path in said["roles"]),
        Path(said["debian"]),
    )
    images = tuple(Path(path) for path in record["images"])
    # The file of a cluster that an older checkout started doesn't say it.
    packaged = record.get("packaged", False)
    return Cluster(folder, record["workers"], record["apiPort"], programs, images, packaged)


def default_folder() -> Path:
    """`RLJOB_CLUSTER`, or one folder of the user."""
    named = os.environ.get("RLJOB_CLUSTER")
    return Path(named).resolve() if named else Path.home() / ".cache" / "rljob" / "cluster"

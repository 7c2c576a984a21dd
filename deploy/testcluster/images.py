"""Container images without a registry: archives packed from folders, and their import into a node's containerd."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testcluster.commands import run
from testcluster.layout import Cluster, ClusterNode
from testcluster.node_settings import CONTAINERD_SOCKET

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """What goes into an image beside its files."""

    name: str
    """The image's name with a tag, which is never `latest`: the kubelet would want to pull it."""
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def read_configuration(archive: Path) -> dict[str, Any]:
    """What an archive says of its image: architecture, layers, and below `config` how it is run and its labels."""
    with tarfile.open(archive) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]
        configuration: dict[str, Any] = json.load(image.extractfile(manifest["Config"]))  # type: ignore[arg-type]
    return configuration


def read_names(archive: Path) -> list[str]:
    """Names and tags of the images in an archive; none where they have none, or it has another form."""
    with tarfile.open(archive) as images:
        try:
            manifests = json.load(images.extractfile("manifest.json"))  # type: ignore[arg-type]
        except KeyError:
            return []
    return [name for manifest in manifests for name in manifest["RepoTags"] or ()]


def pack(image: Image, layers: Sequence[Path], archive: Path) -> None:
    """Packs folders, one a layer, into an archive that `docker load` and `ctr images import` take.

    The archive is the same for the same files: times are left out.
    """
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        packed = []
        for index, layer in enumerate(layers):
            tar = Path(folder, f"{index}.tar")
            order = ["--sort=name", "--mtime=@0", "--numeric-owner", "--owner=0", "--group=0"]
            run(["tar", *order, "-C", str(layer), "-cf", str(tar), "."])
            packed.append((tar, _digest(tar)))
        process = {
            "Env": [f"{name}={value}" for name, value in image.environment.items()],
            "Entrypoint": list(image.entrypoint),
            "Cmd": list(image.command),
            "User": image.user,
            "Labels": dict(image.labels),
            "WorkingDir": "/",
        }
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "created": "1970-01-01T00:00:00Z",
                "config": process,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for _, digest in packed]},
                "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "rljob"} for _ in packed],
            }
        ).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        layer_names = [f"{digest}/layer.tar" for _, digest in packed]
        manifest = json.dumps([{"Config": config_name, "RepoTags": [image.name], "Layers": layer_names}]).encode()
        unfinished = Path(folder, "image.tar")
        with tarfile.open(unfinished, "w") as out:
            for name, content in ((config_name, config), ("manifest.json", manifest)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                out.addfile(entry, io.BytesIO(content))
            for (tar, _), name in zip(packed, layer_names, strict=True):
                out.add(tar, name)
        unfinished.rename(archive)


@dataclass(frozen=True)
class Ctr:
    """containerd's own client, within a node's namespaces or with the command that enters them."""

    cluster: Cluster
    node: ClusterNode
    enter: Sequence[str] = ()

    def __call__(self, *arguments: str) -> str:
        return run([*self._command(), *arguments])

    def _command(self) -> list[str]:
        ctr = str(self.cluster.node_root / "usr/bin/ctr")
        return [*self.enter, ctr, f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io"]

    def answers(self) -> bool:
        return subprocess.run([*self._command(), "version"], capture_output=True).returncode == 0

    def remove_containers(self) -> None:
        """Removes the records of containers from an earlier life; none of them runs."""
        if left := self("containers", "list", "--quiet").split():
            self("containers", "remove", *left)

    def bring(self, archive: Path) -> None:
        """Imports an archive unless its images are what this node has under their names.

        Archives of one name follow each other, in any order: a checkout whose image the node had earlier comes back.
        """
        digest = f"{archive.name} {archive.stat().st_size}-{archive.stat().st_mtime_ns}"
        marks = [self.node.folder / "imported" / quote(name, safe="") for name in read_names(archive)]
        if marks and all(mark.exists() and mark.read_text() == digest for mark in marks):
            return
        for mark in marks:
            # First: whoever is interrupted here must not believe in what was there before.
            mark.unlink(missing_ok=True)
        self("images", "import", str(archive))
        for mark in marks:
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(digest)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Kueue's own definition of a Workload, from its Go module. Nothing of Kueue is built or run: tests play it.

`python tests/integration/kube/kueue.py` (part of `make programs`) downloads the module, checks it against the sums in
`kueue_module/go.sum`, and keeps the one file that is needed in the cache of the test programs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from testcluster.commands import fetch
from testcluster.programs import ProgramMissingError, cached

MODULE = "sigs.k8s.io/kueue"
"""In the version that the go.mod among the pins says."""
PINS = Path(__file__).parent / "kueue_module"
MANIFEST = "kueue.x-k8s.io_workloads.yaml"


def workload_crd(*, download: bool = False) -> bytes:
    """The CustomResourceDefinition of Workload, as YAML.

    Raises:
        ProgramMissingError: it is not in the cache, and isn't to be or can't be downloaded.
    """
    digest = hashlib.sha256((PINS / "go.sum").read_bytes()).hexdigest()[:12]
    return (cached(f"kueue-{digest}", download, _download) / MANIFEST).read_bytes()


def _download(to: Path) -> None:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise ProgramMissingError("Kueue's module must be downloaded and Go 1.26 isn't installed: install Go")
    found = json.loads(fetch([go, "mod", "download", "-json", MODULE], PINS))
    source = Path(found["Dir"]) / "config" / "components" / "crd" / "bases" / MANIFEST
    (to / MANIFEST).write_bytes(source.read_bytes())


if __name__ == "__main__":
    sys.stdout.write(f"{len(workload_crd(download=True))} bytes of {MODULE}\n")

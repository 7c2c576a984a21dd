"""The programs the tests run: Kubernetes, KubeRay's operator, Helm and etcd, built or unpacked once and cached.

Kubernetes, KubeRay and Helm come from their Go modules, pinned by the go.mod and go.sum files beside this one; etcd
comes from Debian's package. Each lies in a folder of the cache (`RLJOB_TEST_CACHE`, by default
`~/.cache/rljob/programs`) that is named by a hash of everything that goes into it, so a second call builds nothing and
a changed pin builds anew. With `KUBEBUILDER_ASSETS` set, the programs found in that folder are used instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

GO_MODULES = Path(__file__).parent / "go"
KUBERNETES_VERSION = "v1.36.3"


class ProgramMissingError(RuntimeError):
    """A program the tests need isn't there and can't be made here; the message says in one line what to do."""


@dataclass(frozen=True)
class GoProgram:
    """One binary built from a Go module of ours, and the names under which it is called."""

    name: str
    package: str
    links: tuple[str, ...]
    ldflags: str = "-s -w"
    crds_of: str | None = None
    """A module whose `config/crd/bases` is copied beside the binary."""


KUBERNETES = GoProgram(
    name="kubernetes",
    package=".",
    links=("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
    # Without the stamp the server reports v0.0.0 and clients that compare versions refuse it.
    ldflags=(
        f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"
        " -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36"
    ),
)
KUBERAY = GoProgram(
    name="kuberay",
    package="github.com/ray-project/kuberay/ray-operator",
    links=("ray-operator",),
    crds_of="github.com/ray-project/kuberay/ray-operator",
)
HELM = GoProgram(name="helm", package="helm.sh/helm/v4/cmd/helm", links=("helm",))


@dataclass(frozen=True)
class Programs:
    """Where each program lies, by the name it is called by, and KubeRay's CRDs."""

    paths: dict[str, Path] = field(default_factory=dict)
    crds: tuple[Path, ...] = ()

    def path(self, name: str) -> Path:
        if name not in self.paths:
            raise ProgramMissingError(
                f"{name} is missing: run `python tests/integration/prepare.py` (needs Go and Debian's etcd-server)"
            )
        return self.paths[name]


def cache_folder() -> Path:
    """Where built programs are kept between runs, outside the checkout."""
    named = os.environ.get("RLJOB_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rljob" / "programs"


def find(*, build: bool, say: Callable[[str], None] = lambda _line: None, helm: bool = False) -> Programs:
    """All programs; those not cached yet are made when `build` is set.

    Raises:
        ProgramMissingError: one is neither cached nor in `KUBEBUILDER_ASSETS`, and isn't to be or can't be built.
    """
    paths: dict[str, Path] = {}
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        paths = {name: path for name in (*KUBERNETES.links, "etcd") if (path := Path(assets) / name).exists()}
    wanted = [KUBERAY, HELM] if helm else [KUBERAY]
    if not {"kube-apiserver", "kube-controller-manager", "kubectl"} <= paths.keys():
        wanted.insert(0, KUBERNETES)
    crds: tuple[Path, ...] = ()
    for program in wanted:
        make = partial(_build_go, program, say=say)
        folder = _cached(f"{program.name}-{_fingerprint(program)}", build, make)
        for link in program.links:
            paths.setdefault(link, folder / "bin" / link)
        if program.crds_of:
            crds = tuple(sorted((folder / "crds").glob("*.yaml")))
    if "etcd" not in paths:
        installed = shutil.which("etcd")
        paths["etcd"] = Path(installed) if installed else _cached("etcd", build, _unpack_etcd) / "usr" / "bin" / "etcd"
    return Programs(paths, crds)


def _fingerprint(program: GoProgram) -> str:
    digest = hashlib.sha256(repr(program).encode())
    for source in sorted((GO_MODULES / program.name).iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:12]


def _cached(name: str, build: bool, make: Callable[[Path], None]) -> Path:
    """The cache folder `name`, made whole by `make` or not at all; concurrent callers wait for the first."""
    folder = cache_folder() / name
    if folder.exists():
        return folder
    if not build:
        raise ProgramMissingError(
            f"{name.split('-')[0]} isn't built yet: run `python tests/integration/prepare.py` once"
            " (10 minutes on two cores), or set KUBEBUILDER_ASSETS"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{name}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_go(program: GoProgram, to: Path, *, say: Callable[[str], None]) -> None:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise ProgramMissingError(
            f"{program.name} must be built and Go 1.26 isn't installed: install Go, or set KUBEBUILDER_ASSETS"
        )
    say(f"building {program.name} from its Go module (minutes, once)")
    source = GO_MODULES / program.name
    environment = os.environ | {"CGO_ENABLED": "0"}
    binary = to / "bin" / program.name
    _run(
        [go, "build", "-trimpath", "-ldflags", program.ldflags, "-o", str(binary), program.package], source, environment
    )
    for link in program.links:
        if link != program.name:
            (to / "bin" / link).symlink_to(program.name)
    if program.crds_of:
        module = _run([go, "list", "-m", "-f", "{{.Dir}}", program.crds_of], source, environment).strip()
        (to / "crds").mkdir()
        for crd in Path(module, "config", "crd", "bases").glob("*.yaml"):
            (to / "crds" / crd.name).write_bytes(crd.read_bytes())


def _unpack_etcd(to: Path) -> None:
    if shutil.which("apt-get") is None:
        raise ProgramMissingError("etcd is missing: install etcd, or set KUBEBUILDER_ASSETS")
    # The package isn't installed, only unpacked: installing it would start a service.
    with tempfile.TemporaryDirectory() as downloads:
        _run(["apt-get", "download", "etcd-server"], Path(downloads), dict(os.environ))
        (package,) = Path(downloads).glob("etcd-server_*.deb")
        _run(["dpkg", "-x", str(package), str(to)], to, dict(os.environ))


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise ProgramMissingError(f"`{' '.join(command[:3])}` in {folder.name} failed: {tail}")
    return done.stdout

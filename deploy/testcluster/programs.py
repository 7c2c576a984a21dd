"""The programs that tests and the test cluster run, built or unpacked once and cached.

Kubernetes, KubeRay's operator, Helm, CoreDNS and the pause program come from Go modules, pinned by the go.mod and
go.sum files in `go/`; the rest comes from Debian's packages (`debian`). Each lies in a folder of the cache
(`RLJOB_TEST_CACHE`, by default `~/.cache/rljob/programs`) that is named by a hash of everything that goes into it, so a
second call builds nothing and a changed pin builds anew. With `KUBEBUILDER_ASSETS` set, Kubernetes' programs and etcd
are taken from that folder, as far as they are there; envtest's has no controllers, so Kubernetes is built nevertheless.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from testcluster import debian
from testcluster.commands import CommandFailedError, fetch, run

GO_MODULES = Path(__file__).parent / "go"
KUBERNETES_VERSION = "v1.36.3"
OTHER_VERSIONS = {"oldest": "v1.33.13", "newest": "v1.37.2"}
"""Other versions of Kubernetes, of which only an API server runs: the oldest minor version that the chart's
`kubeVersion` allows, and the newest that tests run on."""


class ProgramMissingError(RuntimeError):
    """A program that is needed isn't there and can't be made here; the message says in one line what to do."""


GO_VERSION = (1, 26)
DEBIAN_RELEASE = 12
"""The oldest whose containerd and runc run this Kubernetes."""
OS_RELEASE = Path("/etc/os-release")
PREPARE = "run `make programs` once (20 minutes on two cores; needs Go 1.26 and Debian's packages)"


@dataclass(frozen=True)
class GoProgram:
    """One binary built from a Go module of ours, and the names under which it is called."""

    name: str
    package: str
    links: tuple[str, ...]
    ldflags: str = "-s -w"
    manifests_of: str | None = None
    """A module whose CRDs and roles (`config/crd/bases`, `config/rbac`) are copied beside the binary."""


def _stamped(version: str) -> str:
    """Linker flags: without the stamp a server reports v0.0.0, and clients that compare versions refuse it."""
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())])


KUBERNETES = GoProgram(
    name="kubernetes",
    package=".",
    links=("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
    ldflags=_stamped(KUBERNETES_VERSION),
)
OTHER_API_SERVERS = {
    age: GoProgram(name=f"kubernetes-{age}", package=".", links=("kube-apiserver",), ldflags=_stamped(version))
    for age, version in OTHER_VERSIONS.items()
}
KUBERAY = GoProgram(
    name="kuberay",
    package="github.com/ray-project/kuberay/ray-operator",
    links=("ray-operator",),
    manifests_of="github.com/ray-project/kuberay/ray-operator",
)
HELM = GoProgram(name="helm", package="helm.sh/helm/v4/cmd/helm", links=("helm",))
COREDNS = GoProgram(name="coredns", package=".", links=("coredns",))
PAUSE = GoProgram(name="pause", package=".", links=("pause",))
NODE_PACKAGES = (
    *("containerd", "runc", "containernetworking-plugins", "busybox-static"),
    *("nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libxtables12", "libedit2"),
)
"""What a node needs from Debian. containerd's and runc's other libraries belong to every Debian system."""


@dataclass(frozen=True)
class Programs:
    """Where each program lies, by the name it is called by, and what else came with them."""

    paths: dict[str, Path] = field(default_factory=dict)
    crds: tuple[Path, ...] = ()
    """KubeRay's CRDs."""
    roles: tuple[Path, ...] = ()
    """What KubeRay's operator may do."""
    debian: Path | None = None
    """The root of the unpacked packages of a node; only with `cluster`."""

    def path(self, name: str) -> Path:
        if name not in self.paths:
            raise ProgramMissingError(f"{name} is missing: {PREPARE}")
        return self.paths[name]


def cache_folder() -> Path:
    """Where built programs are kept between runs, outside the checkout."""
    named = os.environ.get("RLJOB_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rljob" / "programs"


def find(
    *,
    build: bool,
    say: Callable[[str], None] = lambda _line: None,
    helm: bool = False,
    cluster: bool = False,
    api_server: str | None = None,
) -> Programs:
    """All programs; those not cached yet are made when `build` is set.

    `cluster` adds what a node with pods needs. With an `api_server` of `OTHER_VERSIONS` that one is taken.

    Raises:
        ProgramMissingError: one is neither cached nor in `KUBEBUILDER_ASSETS`, and isn't to be or can't be built.
    """
    paths: dict[str, Path] = {}
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        paths = {name: path for name in (*KUBERNETES.links, "etcd") if (path := Path(assets) / name).exists()}
    wanted = [KUBERAY, *([HELM] if helm or cluster else []), *([COREDNS, PAUSE] if cluster else [])]
    needed = set(KUBERNETES.links) if cluster else {"kube-apiserver", "kube-controller-manager", "kubectl"}
    if not needed <= paths.keys():
        wanted.insert(0, KUBERNETES)
    if api_server:
        paths.pop("kube-apiserver", None)
        wanted.insert(0, OTHER_API_SERVERS[api_server])
    crds: tuple[Path, ...] = ()
    roles: tuple[Path, ...] = ()
    for program in wanted:
        make = partial(_build_go, program, say=say)
        folder = cached(f"{program.name}-{_fingerprint(program)}", build, make)
        for link in program.links:
            paths.setdefault(link, folder / "bin" / link)
        if program.manifests_of:
            crds = tuple(sorted((folder / "crds").glob("*.yaml")))
            roles = tuple(sorted((folder / "roles").glob("role.yaml")))
    if "etcd" not in paths:
        installed = shutil.which("etcd")
        paths["etcd"] = Path(installed) if installed else _unpacked("etcd", ("etcd-server",), build) / "usr/bin/etcd"
    root = _unpacked("node", NODE_PACKAGES, build) if cluster else None
    return Programs(paths, crds, roles, root)


def check_that_they_can_be_made() -> str:
    """Looks, in a moment, whether what is not cached could be: before half an hour of other work.

    Returns:
        What was found, in a few words.

    Raises:
        ProgramMissingError: something has to be made, and what that takes is not here.
    """
    try:
        for server in (None, *OTHER_API_SERVERS):
            find(build=False, cluster=True, api_server=server)
    except ProgramMissingError:
        return f"{_go()}, {_release()}: programs can be built"
    return "programs are built"


def _go() -> str:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    wanted = ".".join(map(str, GO_VERSION))
    if go is None:
        raise ProgramMissingError(f"programs must be built and Go {wanted} isn't installed: install Go")
    said = run([go, "env", "GOVERSION"]).strip()
    if tuple(map(int, re.findall(r"\d+", said)[:2])) < GO_VERSION:
        raise ProgramMissingError(f"programs must be built with Go {wanted}, and {go} is {said}: install that")
    return said


def _release() -> str:
    said = dict(line.split("=", 1) for line in OS_RELEASE.read_text().splitlines() if "=" in line)
    name, version = (said.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    if name != "debian" or not version.isdecimal() or int(version) < DEBIAN_RELEASE or not shutil.which("apt-get"):
        needs = f"Debian {DEBIAN_RELEASE} or later with apt-get"
        raise ProgramMissingError(f"programs of a node come from {needs}, and this is {name or '?'} {version}".rstrip())
    return f"Debian {version}"


def _unpacked(name: str, packages: tuple[str, ...], build: bool) -> Path:
    digest = hashlib.sha256(repr(packages).encode()).hexdigest()[:12]
    return cached(f"{name}-{digest}", build, partial(debian.unpack, packages))


def _fingerprint(program: GoProgram) -> str:
    digest = hashlib.sha256(repr(program).encode())
    for source in sorted((GO_MODULES / program.name).iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:12]


def cached(name: str, build: bool, make: Callable[[Path], object]) -> Path:
    """The cache folder `name`, made whole by `make` or not at all; concurrent callers wait for the first.

    Raises:
        ProgramMissingError: it isn't there, and isn't to be or can't be made.
    """
    folder, what = cache_folder() / name, name.rpartition("-")[0]
    if folder.exists():
        return folder
    if not build:
        raise ProgramMissingError(f"{what} isn't built yet: {PREPARE}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{name}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
            try:
                make(unfinished)
                unfinished.rename(folder)
            except CommandFailedError as problem:
                raise ProgramMissingError(f"{what} can't be made here: {problem}") from problem
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
        raise ProgramMissingError(f"{program.name} must be built and Go 1.26 isn't installed: install Go")
    say(f"building {program.name} from its Go module (minutes, once)")
    source = GO_MODULES / program.name
    environment = os.environ | {"CGO_ENABLED": "0"}
    binary = to / "bin" / program.name
    fetch(
        [go, "build", "-trimpath", "-ldflags", program.ldflags, "-o", str(binary), program.package], source, environment
    )
    for link in program.links:
        if link != program.name:
            (to / "bin" / link).symlink_to(program.name)
    if program.manifests_of:
        module = Path(run([go, "list", "-m", "-f", "{{.Dir}}", program.manifests_of], source, environment).strip())
        for folder, manifests in (("crds", "config/crd/bases/*.yaml"), ("roles", "config/rbac/role.yaml")):
            (to / folder).mkdir()
            for manifest in module.glob(manifests):
                (to / folder / manifest.name).write_bytes(manifest.read_bytes())

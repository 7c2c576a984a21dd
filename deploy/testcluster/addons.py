"""What a cluster has beside Kubernetes: cluster DNS, volumes, KubeRay's operator and ours, by its Helm chart."""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.commands import CommandFailedError, run
from testcluster.images import Image, pack
from testcluster.layout import Cluster
from testcluster.node_settings import PAUSE_IMAGE
from testcluster.programs import Programs, cache_folder

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "rljob-operator"
MANIFESTS = Path(__file__).parent / "manifests"
BUSYBOX_IMAGE = "rljob.test/busybox:1"
SHARED_CLASS = "rljob-shared"
ENVIRONMENT_CLASS = "rljob-environment"
VOLUMES = 8
OPERATOR = "rljob-operator"
OPERATOR_NAMESPACE = "rljob"
READY_SECONDS = 300
NOT_YET = (
    *("Unable to connect to the server", "EOF", "handshake timeout", "connection refused"),
    *("deadline exceeded", "Client.Timeout exceeded"),
    # The API server is ready before it has made its own namespaces.
    'namespaces "kube-system" not found',
)
# The manifests are ours; on a busy machine a new API server takes long to say what it would check them by.
UNCHECKED = ("--server-side", "--validate=false")


def program_images(programs: Programs) -> tuple[Path, ...]:
    """Archives of the images that hold a single static program each; packed once."""
    assert programs.debian is not None
    singles = [
        (programs.path("pause"), Image(PAUSE_IMAGE, entrypoint=["/pause"])),
        (programs.path("coredns"), Image("rljob.test/coredns:1", entrypoint=["/coredns"])),
        (programs.path("ray-operator"), Image("rljob.test/kuberay:1", entrypoint=["/ray-operator"])),
        (programs.debian / "bin/busybox", Image(BUSYBOX_IMAGE, command=["/bin/sh"])),
    ]
    return tuple(_packed(program, image) for program, image in singles)


def _packed(program: Path, image: Image) -> Path:
    # A program's folder in the cache is named by a hash of what it was made from.
    origin = program.resolve().relative_to(cache_folder().resolve()).parts[0]
    archive = cache_folder() / "images" / f"{origin}-{program.name}.tar"
    if archive.exists():
        return archive
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        Path(folder).chmod(0o755)
        if program.name == "busybox":
            for part in ("bin", "tmp"):
                Path(folder, part).mkdir()
            Path(folder, "tmp").chmod(0o1777)
            os.link(program, Path(folder, "bin", program.name))
            for applet in run([str(program), "--list"]).split():
                if applet != program.name:
                    Path(folder, "bin", applet).symlink_to(program.name)
        else:
            os.link(program.resolve(), Path(folder, program.name))
        pack(image, [Path(folder)], archive)
    return archive


@dataclass(frozen=True)
class Kubectl:
    """kubectl as administrator of a cluster. What is asked may be asked again: every use of it here is repeatable."""

    cluster: Cluster
    tries: int = 1

    def __call__(self, *arguments: str, text: str | None = None) -> str:
        command = [str(self.cluster.programs.path("kubectl")), f"--kubeconfig={self.cluster.kubeconfig}", *arguments]
        for attempt in range(1, self.tries + 1):
            try:
                return run(command, text=text)
            except CommandFailedError as problem:
                # On a busy machine the API server gives up on handshakes that take too long.
                if attempt == self.tries or not any(sign in str(problem) for sign in NOT_YET):
                    raise
                time.sleep(attempt)
        raise AssertionError("a kubectl of no tries")

    def apply(self, *documents: Any) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": documents}
        self("apply", *UNCHECKED, "-f", "-", text=json.dumps(items))


def install(cluster: Cluster, environment: Path, trainer_image: str) -> None:
    """Installs everything into a cluster whose API server answers, and waits until it is ready."""
    kubectl = Kubectl(cluster, tries=12)
    with ThreadPoolExecutor() as pool:
        # KubeRay's CRDs are large and take the longest.
        crds = [pool.submit(kubectl, "apply", *UNCHECKED, "-f", str(crd)) for crd in cluster.programs.crds]
        kubectl("apply", *UNCHECKED, "-f", str(MANIFESTS / "coredns.yaml"))
        kubectl.apply(*(storage_class(name) for name in (SHARED_CLASS, ENVIRONMENT_CLASS)))
        kubectl.apply(*shared_volumes(cluster), *environment_volumes(environment))
        roles = [argument for role in cluster.programs.roles for argument in ("-f", str(role))]
        for crd in crds:
            crd.result()
        kubectl("apply", *UNCHECKED, *roles, "-f", str(MANIFESTS / "kuberay.yaml"))
    install_operator(cluster, trainer_image)
    timeout = f"--timeout={READY_SECONDS}s"
    names = [node.name for node in cluster.nodes]
    deadline = time.monotonic() + READY_SECONDS
    # `kubectl wait` gives up on what isn't there yet.
    while not {f"node/{name}" for name in names} <= set(kubectl("get", "nodes", "-o", "name").split()):
        if time.monotonic() > deadline:
            raise CommandFailedError(
                f"not all of {', '.join(names)} registered within {READY_SECONDS} s: see their logs"
            )
        time.sleep(0.2)
    kubectl("wait", "nodes", *names, "--for=condition=Ready", timeout)
    deployments = {"kube-system": "coredns", "ray-system": "kuberay-operator", OPERATOR_NAMESPACE: OPERATOR}
    for namespace, deployment in deployments.items():
        kubectl("rollout", "status", f"deployment/{deployment}", "-n", namespace, timeout)


def install_operator(cluster: Cluster, trainer_image: str) -> None:
    """Installs our operator as users do, by its Helm chart; a cluster that has it already gets the present chart."""
    values = {
        "image.repository": "docker.io/rljob/operator",
        "trainerImage": trainer_image,
        "replicaCount": "1",
        "resources.requests.cpu": "20m",
    }
    run(
        [
            str(cluster.programs.path("helm")),
            *("upgrade", "--install", OPERATOR, str(CHART)),
            *("--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
            *(f"--set={name}={value}" for name, value in values.items()),
        ],
        environment=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
    )


def restart_operator(cluster: Cluster) -> None:
    """Starts the operator's pods anew: a new image has the old one's tag, by which Kubernetes sees no change."""
    kubectl = Kubectl(cluster)
    deployment = (f"deployment/{OPERATOR}", "-n", OPERATOR_NAMESPACE)
    kubectl("rollout", "restart", *deployment)
    kubectl("rollout", "status", *deployment, f"--timeout={READY_SECONDS}s")


def storage_class(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaimPolicy": "Retain",
    }


def shared_volumes(cluster: Cluster) -> list[dict[str, Any]]:
    """Folders of the host that pods of all nodes may write to."""
    volumes = []
    for number in range(1, VOLUMES + 1):
        folder = cluster.shared / f"volume{number}"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        volumes.append(_volume(f"shared{number}", SHARED_CLASS, folder, "ReadWriteMany"))
    return volumes


def environment_volumes(environment: Path) -> list[dict[str, Any]]:
    """The checkout with its virtual environment, to be mounted at the path it has here, read-only.

    An image of the trainer has 6 GB; pods that mount the environment start from one of 70 MB.
    """
    checkout = environment.parent
    names = [f"environment{number}" for number in range(1, VOLUMES + 1)]
    return [_volume(name, ENVIRONMENT_CLASS, checkout, "ReadOnlyMany") for name in names]


def renew_volumes(cluster: Cluster, environment: Path) -> None:
    """Volumes whose claim is gone may be claimed again, and those with an environment have this checkout's.

    What was written to them stays.

    Raises:
        CommandFailedError: something still claims another checkout's environment, which the image won't run.
    """
    kubectl = Kubectl(cluster)
    others = []
    for volume in json.loads(kubectl("get", "pv", "-o", "json"))["items"]:
        name, spec, phase = volume["metadata"]["name"], volume["spec"], volume["status"]["phase"]
        if spec.get("storageClassName") == ENVIRONMENT_CLASS and Path(spec["hostPath"]["path"]) != environment.parent:
            if phase == "Bound":
                claim = spec["claimRef"]
                raise CommandFailedError(
                    f"this cluster runs jobs of the checkout {spec['hostPath']['path']} (claim {claim['name']} in "
                    f"{claim['namespace']}): delete that claim's namespace, or start anew with make cluster-down"
                )
            others.append(name)
        elif phase == "Released":
            remove = json.dumps([{"op": "remove", "path": "/spec/claimRef"}])
            kubectl("patch", "pv", name, "--type=json", "--patch", remove)
    if others:
        # A volume's folder can't be changed.
        kubectl("delete", "pv", *others, "--timeout=60s")
    # Whether or not some were deleted now: an earlier call may have ended in between.
    kubectl.apply(*environment_volumes(environment))


def _volume(name: str, storage: str, folder: Path, mode: str) -> dict[str, Any]:
    # Pods that must be `restricted` may claim such a volume, and may not name a host path themselves.
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"rljob.dev/path": str(folder)}},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": [mode],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": storage,
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }

"""The test cluster itself: pods on several nodes that find each other, nodes that die and return, and no traces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testcluster import addons, building, control, layout, life
from testcluster.addons import BUSYBOX_IMAGE, OPERATOR_NAMESPACE, Kubectl
from testcluster.commands import CommandFailedError
from testcluster.images import Image, pack
from testcluster.layout import Cluster
from testcluster.programs import find

sys.path.insert(0, str(Path(__file__).parent))
from traces import traces

pytestmark = pytest.mark.timeout(300)
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, node: str, script: str, image: str = BUSYBOX_IMAGE, **spec: object) -> dict[str, object]:
    container = {
        "name": "main",
        "image": image,
        "command": ["/bin/sh", "-c", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **({"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]} if "volumes" in spec else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "securityContext": RESTRICTED,
            "containers": [container],
            **spec,
        },
    }


def until(what: str, there: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        time.sleep(0.2)


def is_ready(kubectl: Kubectl, node: str) -> bool:
    answer = json.loads(kubectl("get", "node", node, "-o", "json"))
    return any(item["type"] == "Ready" and item["status"] == "True" for item in answer["status"]["conditions"])


def test_pods_on_different_nodes_find_each_other_by_name(kubectl: Kubectl) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "greeter", "namespace": "default"},
        "spec": {"selector": {"app": "greeter"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    serve = "mkdir /tmp/www && echo hello > /tmp/www/index.html && httpd -f -p 8080 -h /tmp/www"
    # The server may come later than who asks.
    ask = "until wget -q -O - http://greeter.default.svc.cluster.local/ 2>/dev/null; do sleep 0.5; done"
    kubectl.apply(service, pod("greeter", "worker1", serve), pod("guest", "worker2", ask))
    kubectl("wait", "pod/guest", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    assert kubectl("logs", "guest") == "hello\n"
    assert kubectl("exec", "greeter", "--", "cat", "/tmp/www/index.html") == "hello\n"


def test_a_shared_volume_is_one_folder_on_all_nodes(kubectl: Kubectl) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared", "namespace": "default"},
        "spec": {
            "storageClassName": "rljob-shared",
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    kubectl.apply(
        claim,
        pod("writer", "worker1", "echo written > /shared/note", volumes=volumes),
        pod("reader", "worker2", "until cat /shared/note 2>/dev/null; do sleep 0.2; done", volumes=volumes),
    )
    kubectl("wait", "pod/reader", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    assert kubectl("logs", "reader") == "written\n"


def test_a_second_start_finds_the_cluster_running(cluster: Cluster) -> None:
    said: list[str] = []
    again = life.up(cluster.folder, workers=2, say=said.append)
    assert again.api_port == cluster.api_port
    assert said == ["the cluster runs already"]


def test_a_second_start_goes_back_from_the_trainers_image_when_it_is_told_to(cluster: Cluster) -> None:
    # As if the cluster had been started with the trainer's image, which takes gigabytes and minutes.
    replace(cluster, packaged=True).save()
    again = life.up(cluster.folder, workers=2, say=lambda _line: None, packaged=False)
    assert again == layout.load(cluster.folder) == cluster


def test_a_second_start_brings_the_operator_up_to_date(cluster: Cluster, kubectl: Kubectl) -> None:
    def operators() -> set[str]:
        pods = kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "jsonpath={.items[*].metadata.uid}")
        return set(pods.split())

    before = operators()
    # As if the operator's image had been another one so far.
    replace(cluster, images=cluster.images[:-1]).save()
    said: list[str] = []
    again = life.up(cluster.folder, workers=2, say=said.append)
    assert said == ["the cluster runs already", "its operator is renewed"]
    assert layout.load(cluster.folder).images == again.images == cluster.images
    assert operators() - before


def test_an_image_that_another_one_of_its_name_replaced_comes_back(
    cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    # As two checkouts have it, whose images differ in their search paths.
    shell = tmp_path / "layer" / "bin" / "sh"
    shell.parent.mkdir(parents=True)
    shutil.copy(cluster.programs.debian / "bin/busybox", shell)
    for folder in (tmp_path / "layer", shell.parent, shell):
        folder.chmod(0o755)
    for name in ("first", "second"):
        image = Image("rljob.test/checkout:1", environment={"CHECKOUT": name})
        pack(image, [tmp_path / "layer"], tmp_path / f"{name}.tar")
    node = cluster.node("worker1")
    for turn, name in enumerate(("first", "second", "first")):
        life.bring(cluster, node, tmp_path / f"{name}.tar")
        asked = pod(f"checkout{turn}", node.name, "echo $CHECKOUT", image="rljob.test/checkout:1")
        kubectl.apply(asked)
        kubectl("wait", f"pod/checkout{turn}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
        assert kubectl("logs", f"checkout{turn}") == f"{name}\n"


def test_a_cluster_that_runs_gets_the_environment_of_the_checkout_that_asks(cluster: Cluster, kubectl: Kubectl) -> None:
    def folders() -> set[str]:
        paths = "jsonpath={.items[?(@.spec.storageClassName=='rljob-environment')].spec.hostPath.path}"
        return set(kubectl("get", "pv", "-o", paths).split())

    here = folders()
    try:
        addons.renew_volumes(cluster, Path("/elsewhere/.venv"))
        assert folders() == {"/elsewhere"}
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "environment", "namespace": "default"},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "rljob-environment",
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        kubectl.apply(claim)
        kubectl("wait", "pvc/environment", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
        with pytest.raises(CommandFailedError, match=r"jobs of the checkout /elsewhere .*make cluster-down"):
            life.up(cluster.folder, workers=2, say=lambda _line: None)
        assert folders() == {"/elsewhere"}
    finally:
        kubectl("delete", "pvc", "environment", "--ignore-not-found")
        # Kubernetes notices some moments later that the claim is gone.
        phases = "jsonpath={.items[?(@.spec.storageClassName=='rljob-environment')].status.phase}"
        until("no environment is bound", lambda: "Bound" not in kubectl("get", "pv", "-o", phases))
        life.up(cluster.folder, workers=2, say=lambda _line: None)
    assert folders() == here == {str(building.ROOT)}


def test_a_killed_node_is_noticed_and_returns(cluster: Cluster, kubectl: Kubectl) -> None:
    life.kill(cluster.node("worker2"))
    until("worker2 is lost", lambda: not is_ready(kubectl, "worker2"))
    assert is_ready(kubectl, "worker1")
    control.ask(cluster.socket, "start worker2")
    until("worker2 is back", lambda: is_ready(kubectl, "worker2"))
    kubectl.apply(pod("returned", "worker2", "echo back"))
    kubectl("wait", "pod/returned", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")


def test_a_stopped_api_server_comes_back_with_everything_in_it(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl("create", "configmap", "kept")
    node = cluster.node("control")
    control.ask(node.socket, "stop kube-apiserver")
    assert "kube-apiserver" not in control.ask(node.socket, "programs").split()
    with pytest.raises(CommandFailedError):
        kubectl("get", "configmap", "kept")
    control.ask(node.socket, "start kube-apiserver")

    def answers() -> bool:
        try:
            return "kept" in kubectl("get", "configmap", "kept")
        except CommandFailedError:
            return False

    until("the API server answers", answers)


def test_a_program_that_crashes_is_started_again(cluster: Cluster) -> None:
    node = cluster.node("worker1")
    (before,) = _pids_of("kube-proxy", node.folder)
    subprocess.run(["kill", "-KILL", str(before)], check=True)
    until("kube-proxy runs again", lambda: _pids_of("kube-proxy", node.folder) not in ([], [before]), seconds=20)


def _pids_of(program: str, folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = entry.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if Path(words[0]).name == program and any(str(folder) in word for word in words):
                found.append(int(entry.name))
    return found


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The kubelet's sockets lie in it, and paths of sockets have to be short."""
    with tempfile.TemporaryDirectory(prefix="rljob-", dir="/tmp") as folder:
        yield Path(folder)


def test_nothing_is_left_of_a_cluster_that_ended(short_folder: Path) -> None:
    programs = find(build=False, cluster=True)
    assert programs.debian is not None
    nft, libraries = programs.debian / "usr/sbin/nft", programs.debian / "usr/lib/x86_64-linux-gnu"
    cgroup = Cluster(short_folder, 1, 0, programs).cgroup
    before = traces(nft, libraries, short_folder, cgroup)
    assert before["processes"] == []
    made = life.up(short_folder, workers=1, say=lambda _line: None)
    Kubectl(made).apply(pod("busy", "worker1", "sleep 1000"))
    Kubectl(made)("wait", "pod/busy", "--for=condition=Ready", "--timeout=60s")
    while_it_runs = traces(nft, libraries, short_folder, cgroup)
    # The pod's own process is found, so one that stays behind would be.
    assert any("sleep 1000" in process for process in while_it_runs["processes"])
    for kind in ("mounts", "links", "addresses", "routes", "firewall", "settings"):
        assert while_it_runs[kind] == before[kind]
    assert life.down(short_folder)
    assert traces(nft, libraries, short_folder, cgroup) == before
    assert not life.down(short_folder)

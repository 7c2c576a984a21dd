"""A node's settings: addresses that don't collide, certificates that verify, a record that is read back as written."""

from __future__ import annotations

import ipaddress
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from testcluster import certificates, layout, life, node_settings
from testcluster.__main__ import main, next_commands
from testcluster.building import VERSION
from testcluster.layout import MOST_WORKERS, NODE_NETWORK, POD_NETWORK, Cluster
from testcluster.programs import Programs

ROOT = Path(__file__).parents[2]
NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    programs = Programs({name: Path("/programs", name) for name in NAMES}, debian=Path("/debian"))
    return Cluster(tmp_path, workers=2, api_port=40123, programs=programs, images=(tmp_path / "one.tar",))


def test_addresses_lie_in_their_networks_and_differ(cluster: Cluster) -> None:
    nodes = Cluster(cluster.folder, MOST_WORKERS, 0, cluster.programs).nodes
    addresses = [ipaddress.ip_address(node.address) for node in nodes]
    pods = [ipaddress.ip_network(node.pods) for node in nodes]
    assert all(address in ipaddress.ip_network(NODE_NETWORK) for address in addresses)
    assert all(network.subnet_of(ipaddress.ip_network(POD_NETWORK)) for network in pods)
    assert len(set(addresses)) == len(set(pods)) == MOST_WORKERS + 1
    assert layout.HUB_ADDRESS not in {node.address for node in nodes}


def test_what_is_saved_is_loaded(cluster: Cluster) -> None:
    for written in (cluster, replace(cluster, packaged=True)):
        written.save()
        assert layout.load(cluster.folder) == written


def test_a_renewed_cluster_starts_jobs_from_the_image_it_did_unless_another_is_asked_for(cluster: Cluster) -> None:
    """`make cluster-up PACKAGED=1`, then `make e2e`, which renews the cluster without a word about images."""
    images = (cluster.folder / "two.tar",)
    asked = {None: {False: False, True: True}, True: {False: True, True: True}, False: {False: False, True: False}}
    for packaged, became in asked.items():
        for before, after in became.items():
            renewed = life.renewal(replace(cluster, packaged=before), images, packaged=packaged)
            assert (renewed.packaged, renewed.images) == (after, images)
            assert ("rljob/trainer" in life.trainer_image(renewed)) == after


@pytest.mark.parametrize(("packaged", "printed"), [(True, f"docker.io/rljob/trainer:{VERSION}\n"), (False, "")])
def test_the_trainers_image_is_printed_where_jobs_start_from_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], packaged: bool, printed: str
) -> None:
    replace(cluster, packaged=packaged).save()
    assert main([f"--folder={cluster.folder}", "trainer-image"]) == 0
    assert capsys.readouterr().out == printed


def test_the_commands_that_come_next_point_kubectl_at_the_cluster_and_are_the_laptop_pages(tmp_path: Path) -> None:
    programs = Programs({"kubectl": tmp_path / "bin" / "kubectl", "helm": tmp_path / "tools" / "helm"})
    made = Cluster(tmp_path, workers=2, api_port=40123, programs=programs, packaged=True)
    export, *applied = next_commands(made)
    assert export == f"export KUBECONFIG={tmp_path}/kubeconfig PATH={tmp_path}/bin:{tmp_path}/tools:$PATH"
    page = (ROOT / "docs" / "laptop.md").read_text().splitlines()
    assert len(applied) == 3
    assert [line for line in page if line in applied] == applied
    # Without the trainer's image those jobs would find no trainer: they are to mount it.
    again, fitting, wait = next_commands(replace(made, packaged=False))
    assert (again, wait) == (export, applied[-1])
    assert fitting.split()[:2] == ["make", "cluster-apply"]
    dry = subprocess.run(["make", "-n", "cluster-apply"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "testcluster apply examples/cluster/storage.yaml examples/cluster/quickstart.yaml" in dry


def test_an_unknown_node_is_named_with_those_there_are(cluster: Cluster) -> None:
    with pytest.raises(KeyError, match=r"no node worker7; there are control, worker1, worker2"):
        cluster.node("worker7")


def test_clusters_in_different_folders_have_different_control_groups(cluster: Cluster, tmp_path: Path) -> None:
    assert Cluster(tmp_path / "other", 2, 0, cluster.programs).cgroup != cluster.cgroup


def test_certificates_are_signed_for_their_use_and_name(cluster: Cluster) -> None:
    certificates.make(cluster)

    def verify(name: str, purpose: str, *options: str) -> str:
        command = ["openssl", "verify", "-CAfile", "ca.crt", "-purpose", purpose, *options, f"{name}.crt"]
        return subprocess.run(command, cwd=cluster.certificates, capture_output=True, text=True).stdout

    assert "OK" in verify("apiserver", "sslserver", "-verify_ip", "127.0.0.1")
    assert "OK" in verify("apiserver", "sslserver", "-verify_hostname", "kubernetes.default.svc")
    assert "OK" in verify("worker1-server", "sslserver", "-verify_ip", cluster.node("worker1").address)
    assert "OK" not in verify("worker1-server", "sslserver", "-verify_ip", cluster.node("worker2").address)
    assert "OK" in verify("worker1", "sslclient")
    assert "OK" not in verify("worker1", "sslserver")


def test_the_administrators_way_is_the_hosts_loopback_and_the_nodes_way_their_network(cluster: Cluster) -> None:
    certificates.make(cluster)

    def server(path: Path) -> str:
        return str(yaml.safe_load(path.read_text())["clusters"][0]["cluster"]["server"])

    assert server(cluster.kubeconfig) == "https://127.0.0.1:40123"
    assert server(cluster.certificates / "worker1.conf") == "https://10.89.0.10:6443"
    assert cluster.kubeconfig.stat().st_mode & 0o077 == 0


def test_only_the_control_plane_runs_the_control_plane(cluster: Cluster) -> None:
    control, worker, _ = cluster.nodes
    assert set(node_settings.commands(cluster, control)) == {"containerd", *NAMES}
    assert set(node_settings.commands(cluster, worker)) == {"containerd", "kubelet", "kube-proxy"}
    assert node_settings.kubelet(cluster, control)["registerWithTaints"] == [node_settings.CONTROL_PLANE_TAINT]
    assert "registerWithTaints" not in node_settings.kubelet(cluster, worker)

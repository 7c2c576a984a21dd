"""The files and command lines of a node's programs. Pure but for `write`; why a setting is there stands beside it."""

from __future__ import annotations

import json
from typing import Any

from testcluster.certificates import kubelet_server
from testcluster.layout import API_PORT, DNS_SERVICE, POD_NETWORK, SERVICE_NETWORK, Cluster, ClusterNode

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "rljob.test/pause:1"
ETCD = "http://127.0.0.1:2379"
CONTROL_PLANE_TAINT = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}


def write(cluster: Cluster, node: ClusterNode) -> None:
    """Writes the settings files of a node's programs."""
    (node.folder / "cni").mkdir(parents=True, exist_ok=True)
    (node.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(pod_network(node), indent=2))
    (node.folder / "containerd.toml").write_text(containerd(cluster, node))
    # JSON is YAML.
    (node.folder / "kubelet.yaml").write_text(json.dumps(kubelet(cluster, node), indent=2))
    (node.folder / "proxy.yaml").write_text(json.dumps(proxy(cluster, node), indent=2))
    (node.folder / "resolv.conf").write_text("# nothing outside the cluster has a name\n")


def pod_network(node: ClusterNode) -> dict[str, Any]:
    """Pods on a bridge. Addresses are not masqueraded: every node has a route to every node's pods."""
    addresses = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def containerd(cluster: Cluster, node: ClusterNode) -> str:
    """`restrict_oom_score_adj`: without CAP_SYS_RESOURCE runc may not lower the score, and no sandbox would start."""
    return f"""\
version = 2
root = "{node.folder / "containerd"}"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper",
]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = "{cluster.node_root / "usr/sbin/runc"}"
  SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{cluster.node_root / "usr/lib/cni"}"
  conf_dir = "{node.folder / "cni"}"
"""


def kubelet(cluster: Cluster, node: ClusterNode) -> dict[str, Any]:
    certificate = cluster.certificates / kubelet_server(node)
    settings: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{certificate}.crt",
        "tlsPrivateKeyFile": f"{certificate}.key",
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": str(node.folder / "resolv.conf"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        # Nothing outside the node's folder is written, and nothing inside it has to be cleaned on the host.
        "podLogsDir": str(node.folder / "pod-logs"),
        "volumePluginDir": str(node.folder / "volume-plugins"),
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.cgroup}/{node.name}",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # There is no iptables here: kube-proxy speaks nftables.
        "makeIPTablesUtilChains": False,
        # The nodes share one disk with everything else; what they may use is said absolutely.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "5s",
        "serializeImagePulls": False,
        "maxPods": 60,
    }
    if node.is_control_plane:
        settings["registerWithTaints"] = [CONTROL_PLANE_TAINT]
    return settings


def proxy(cluster: Cluster, node: ClusterNode) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(cluster.certificates / "proxy.conf")},
        "hostnameOverride": node.name,
        "clusterCIDR": POD_NETWORK,
        "bindAddress": node.address,
        "oomScoreAdj": 0,
        # The limits of connection tracking belong to the whole machine and stay as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def commands(cluster: Cluster, node: ClusterNode) -> dict[str, list[str]]:
    """The command line of each program of a node, by name."""
    path = cluster.programs.path
    kubeconfig = cluster.certificates / f"{node.name}.conf"
    lines = {
        "containerd": [str(cluster.node_root / "usr/bin/containerd"), f"--config={node.folder / 'containerd.toml'}"],
        "kubelet": [
            str(path("kubelet")),
            f"--config={node.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={node.folder / 'kubelet'}",
            f"--node-ip={node.address}",
            f"--hostname-override={node.name}",
        ],
        "kube-proxy": [str(path("kube-proxy")), f"--config={node.folder / 'proxy.yaml'}"],
    }
    return lines | (_control_plane(cluster, node) if node.is_control_plane else {})


def _control_plane(cluster: Cluster, node: ClusterNode) -> dict[str, list[str]]:
    path, certificates = cluster.programs.path, cluster.certificates
    signing_key = certificates / "service-accounts.key"

    def client_of(name: str) -> list[str]:
        file = certificates / f"{name}.conf"
        return [f"--{kind}={file}" for kind in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")]

    return {
        "etcd": [
            str(path("etcd")),
            f"--data-dir={node.folder / 'etcd'}",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # The data is thrown away with the cluster.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            str(path("kube-apiserver")),
            f"--etcd-servers={ETCD}",
            "--bind-address=0.0.0.0",
            f"--secure-port={API_PORT}",
            f"--advertise-address={node.address}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--tls-cert-file={certificates / 'apiserver.crt'}",
            f"--tls-private-key-file={certificates / 'apiserver.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={certificates / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={signing_key}",
            f"--kubelet-client-certificate={certificates / 'apiserver-kubelet.crt'}",
            f"--kubelet-client-key={certificates / 'apiserver-kubelet.key'}",
            f"--kubelet-certificate-authority={certificates / 'ca.crt'}",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            str(path("kube-controller-manager")),
            *client_of("controller-manager"),
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={signing_key}",
            f"--root-ca-file={certificates / 'ca.crt'}",
            # The nodes' pod networks are fixed: see `layout.Node.pods`.
            "--allocate-node-cidrs=false",
            # A lost node is noticed after 20 s, not 50: tests wait for it.
            "--node-monitor-grace-period=20s",
        ],
        "kube-scheduler": [str(path("kube-scheduler")), *client_of("scheduler"), "--leader-elect=false"],
    }

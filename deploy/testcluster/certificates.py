"""The cluster's certificates and kubeconfigs, made anew with openssl at every start (a third of a second)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from testcluster.commands import run
from testcluster.layout import API_PORT, API_SERVICE, Cluster, ClusterNode

DAYS = "365"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_API_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


def make(cluster: Cluster) -> None:
    """Writes everything that the cluster's programs need to know each other."""
    folder = cluster.certificates
    folder.mkdir(parents=True, exist_ok=True)
    ca = ("-x509", "-days", DAYS, "-subj", "/CN=rljob-test-cluster")
    run(["openssl", "req", *_NEW_KEY, *ca, "-keyout", "ca.key", "-out", "ca.crt"], folder)
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "service-accounts.key"], folder)
    run(["openssl", "ec", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub"], folder)
    control, *_ = cluster.nodes
    inside = f"https://{control.address}:{API_PORT}"
    addresses = ("127.0.0.1", API_SERVICE, control.address)
    _server(folder, "apiserver", "/CN=kube-apiserver", (*_API_NAMES, "localhost"), addresses)
    # What may talk to kubelets: logs, exec.
    _client(folder, "apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    for name, subject in {
        "controller-manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
        "proxy": "/CN=system:kube-proxy",
    }.items():
        _client(folder, name, subject)
        _kubeconfig(folder, name, inside, folder / f"{name}.conf")
    for node in cluster.nodes:
        _client(folder, node.name, f"/O=system:nodes/CN=system:node:{node.name}")
        _kubeconfig(folder, node.name, inside, folder / f"{node.name}.conf")
        _server(folder, kubelet_server(node), f"/CN={node.name}", (node.name,), (node.address,))
    _client(folder, "admin", "/O=system:masters/CN=kubernetes-admin")
    _kubeconfig(folder, "admin", f"https://127.0.0.1:{cluster.api_port}", cluster.kubeconfig)
    cluster.kubeconfig.chmod(0o600)


def kubelet_server(node: ClusterNode) -> str:
    """Name of the certificate with which a kubelet answers."""
    return f"{node.name}-server"


def _client(folder: Path, name: str, subject: str) -> None:
    _signed(folder, name, subject, "keyUsage=digitalSignature\nextendedKeyUsage=clientAuth\n")


def _server(folder: Path, name: str, subject: str, names: tuple[str, ...], addresses: tuple[str, ...]) -> None:
    known = ",".join([*(f"DNS:{item}" for item in names), *(f"IP:{item}" for item in addresses)])
    usage = "keyUsage=digitalSignature\nextendedKeyUsage=serverAuth\n"
    _signed(folder, name, subject, f"{usage}subjectAltName={known}\n")


def _signed(folder: Path, name: str, subject: str, extensions: str) -> None:
    (folder / f"{name}.ext").write_text(extensions)
    run(["openssl", "req", *_NEW_KEY, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr"], folder)
    authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS)
    request = ("-req", "-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.crt")
    run(["openssl", "x509", *request, *authority], folder)


def _kubeconfig(folder: Path, name: str, server: str, to: Path) -> None:
    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "rljob",
        "clusters": [{"name": "rljob", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "contexts": [{"name": "rljob", "context": {"cluster": "rljob", "user": name}}],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": data(f"{name}.crt"),
                    "client-key-data": data(f"{name}.key"),
                },
            }
        ],
    }
    to.write_text(json.dumps(config, indent=2))

"""A Kubernetes control plane as plain processes: etcd, kube-apiserver, and a controller-manager that collects garbage.

Everything listens on loopback on free ports and writes below one folder. No kubelet and no scheduler: pods stay as
written, and tests play both. The processes die with the one that started them, however that ends.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.aio.client.configuration import Configuration

from kube.crowding import crowding
from kube.mirror import Mirror
from testcluster.programs import Programs

START_SECONDS = 60.0
KUBERAY_LOOK_SECONDS = 5
"""KubeRay, unless told otherwise, looks only every five minutes at a cluster of which it hears nothing. So long it may
leave one without a pod: one that is gone before KubeRay has seen that it is there, for which it waits 30 s."""
CONTROLLERS = ("garbage-collector-controller", "namespace-controller", "clusterrole-aggregation-controller")
LEAN = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}
"""The Go programs collect garbage a quarter as often: a sixth of kube-apiserver's work was that."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ControlPlaneError(RuntimeError):
    """A process of the control plane didn't start or ended; the message quotes the end of its log."""


class ApiCallError(RuntimeError):
    """The API server answered with an error; `code` is its HTTP status, `answer` its body (a Status object)."""

    def __init__(self, code: int, call: str, text: str) -> None:
        super().__init__(f"{code}: {call}: {text[:2000]}")
        self.code = code
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        self.answer: dict[str, Any] = answer if isinstance(answer, dict) else {}


@dataclass
class ControlPlane:
    """A running control plane. Use as a context manager.

    Attributes:
        lean: etcd doesn't wait for the disk and garbage is collected less often: nothing that a test sees, and not what
            a cluster does, for those who measure.
    """

    programs: Programs
    folder: Path
    lean: bool = True
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    server: str = ""
    token: str = ""
    _etcd: str = ""
    _kept: threading.local = field(default_factory=threading.local)
    _mirrors: dict[tuple[str, str], Mirror] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)
    _trust: ssl.SSLContext = field(default_factory=lambda: no_questions_asked())

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        """Of a cluster administrator."""
        return self.folder / "kubeconfig"

    @property
    def pid(self) -> int:
        """Of kube-apiserver."""
        return self.processes["kube-apiserver"].pid

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> dict[str, Any]:
        """One call as administrator, synchronously, from any thread.

        Raises:
            ApiCallError: the server answered with an HTTP error.
            OSError: there was no answer.
        """
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content, "Accept": "application/json"}
        status, text = self._exchange(method, path, data, headers)
        if status >= 400:
            raise ApiCallError(status, f"{method} {path}", text.decode(errors="replace"))
        answer = json.loads(text or b"{}")
        return answer if isinstance(answer, dict) else {}

    def mirror(self, path: str, selector: str = "") -> Mirror:
        """A mirror of a collection that all who ask for it share, until this ends."""
        with self._making:
            if (path, selector) not in self._mirrors:
                headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
                self._mirrors[path, selector] = Mirror(lambda: self._connection(None), headers, path, selector)
            return self._mirrors[path, selector]

    def credentials(self, server: str | None = None, token: str | None = None) -> Configuration:
        """For a client of ours: as administrator or whoever has the token; by way of another address, if given."""
        authorization = f"Bearer {token or self.token}"
        made = Configuration(server or self.server, api_key={"BearerToken": authorization}, verify_ssl=False)
        # Without one of its own, every client that starts reads the whole bundle of the machine.
        made.ssl_ca_cert = str(self.folder / "certificates" / "apiserver.crt")
        return made

    def _exchange(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        # A handshake costs more than most calls: one connection a thread is kept open.
        kept = getattr(self._kept, "connection", None)
        fresh = self._connection(30 * crowding())
        for connection in [kept, fresh] if kept else [fresh]:
            try:
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                text = response.read()
            except (http.client.HTTPException, OSError):
                connection.close()
                self._kept.connection = None
                if connection is not kept:
                    raise
            else:
                self._kept.connection = connection
                return response.status, text
        raise ConnectionError(f"no answer to {method} {path}")

    def _connection(self, timeout: float | None) -> http.client.HTTPSConnection:
        host = self.server.removeprefix("https://")
        return http.client.HTTPSConnection(host, timeout=timeout, context=self._trust)

    def install_crds(self, *manifests: bytes) -> None:
        """Creates CustomResourceDefinitions (YAML) and waits until they are served."""
        made = [
            self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", manifest, "application/yaml")
            for manifest in manifests
        ]
        for crd in made:
            spec = crd["spec"]
            for version in spec["versions"]:
                if version["served"]:
                    self.wait_until_served(spec["group"], version["name"], spec["names"]["plural"])

    def wait_until_served(self, group: str, version: str, plural: str) -> None:
        """Waits for the API server, which serves a kind only a moment after its CRD is there, and says so still later:
        kopf asks it that once."""
        self._wait_for(f"/apis/{group}/{version}/{plural}?limit=1", "kube-apiserver")
        self._wait_for("/apis", "kube-apiserver", f'"groupVersion":"{group}/{version}"')
        self._wait_for(f"/apis/{group}/{version}", "kube-apiserver", f'"name":"{plural}"')

    def start_controllers(self) -> None:
        """Starts garbage collection and namespace deletion, after the CRDs: new kinds are only noticed every 30 s."""
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            f"--controllers={','.join(CONTROLLERS)}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={_free_port()}",
            f"--cert-dir={self.folder / 'controllers'}",
            "--concurrent-gc-syncs=5",
        )

    def install_missing_crds(self, manifests: Iterable[Path]) -> None:
        """Installs the CRDs of those files that aren't there yet."""
        missing = []
        for path in manifests:
            group, _, plural = path.stem.partition("_")
            try:
                self.call("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{group}")
            except ApiCallError as error:
                if error.code != 404:
                    raise
                missing.append(path.read_bytes())
        self.install_crds(*missing)

    def start_kuberay(self) -> None:
        """Starts KubeRay's operator and waits until it is ready."""
        port = _free_port()
        self._spawn(
            "ray-operator",
            f"-kubeconfig={self.kubeconfig}",
            "-enable-leader-election=false",
            f"-metrics-addr=127.0.0.1:{_free_port()}",
            f"-health-probe-bind-address=127.0.0.1:{port}",
            environment={"RAYCLUSTER_DEFAULT_REQUEUE_SECONDS_ENV": str(KUBERAY_LOOK_SECONDS)},
        )
        deadline = time.monotonic() + START_SECONDS * crowding()
        while True:
            try:
                probe = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                probe.request("GET", "/readyz")
                if probe.getresponse().status == 200:
                    return
            except OSError:
                pass
            if self.processes["ray-operator"].poll() is not None or time.monotonic() > deadline:
                raise ControlPlaneError(f"ray-operator isn't ready; its log ends: {self.log_tail('ray-operator')}")
            time.sleep(0.1)

    def stop_program(self, program: str) -> None:
        """Ends one of the processes."""
        process = self.processes.pop(program)
        process.kill()
        process.wait()

    def kubectl(self, *arguments: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as administrator."""
        command = [str(self.programs.path("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=check)

    def restart_api_server(self, pause: float = 0.0) -> None:
        """Kills kube-apiserver, and starts it again on the same port after a pause."""
        self.stop_program("kube-apiserver")
        time.sleep(pause)
        self.start_api_server()

    def start_api_server(self) -> None:
        """Starts kube-apiserver again, where it was."""
        self._start_api_server()
        self._wait_for("/readyz", "kube-apiserver")

    def stop(self) -> None:
        """Ends all processes. Nothing they hold is worth the ten seconds that a graceful end takes."""
        for mirror in self._mirrors.values():
            mirror.close()
        for process in reversed(self.processes.values()):
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token = secrets.token_hex(16)
        self._etcd = f"http://127.0.0.1:{_free_port()}"
        peers = f"http://127.0.0.1:{_free_port()}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--quota-backend-bytes=4294967296",
            *(["--unsafe-no-fsync"] if self.lean else []),
        )
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        key = self.folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        self.server = f"https://127.0.0.1:{_free_port()}"
        self._start_api_server()
        self._write_kubeconfig()
        self._wait_for("/readyz", "kube-apiserver")

    def _start_api_server(self) -> None:
        key = self.folder / "service-accounts.key"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # Nobody asks for the Service kubernetes, and no loopback address may stand behind it.
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.server.rpartition(':')[2]}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            # Pods are admitted without a service account: nobody here makes the default one.
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            "--enable-priority-and-fairness=false",
            "--max-requests-inflight=2000",
            "--max-mutating-requests-inflight=1000",
        )

    def _spawn(self, program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start processes from the main thread: they end with the thread that started them")
        log = (self.folder / f"{program}.log").open("ab")
        with log:
            self.processes[program] = subprocess.Popen(
                [str(self.programs.path(program)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **(LEAN if self.lean else {}), **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _wait_for(self, path: str, program: str, text: str = "") -> None:
        """Waits until the API server answers with that ``text`` in what it says."""
        deadline = time.monotonic() + START_SECONDS * crowding()
        while True:
            try:
                # /readyz answers in plain text.
                status, said = self._exchange("GET", path, None, {"Authorization": f"Bearer {self.token}"})
                if status == 200 and text in said.decode():
                    return
                raise ConnectionError(f"answers {status}" + (f" without {text}" if status == 200 else ""))
            except OSError as error:
                code = self.processes[program].poll()
                if code is not None or time.monotonic() > deadline:
                    state = f"ended with {code}" if code is not None else f"isn't ready: {error}"
                    raise ControlPlaneError(f"{program} {state}; its log ends: {self.log_tail(program)}") from None
                time.sleep(0.05)

    def log_tail(self, program: str, lines: int = 3) -> str:
        """The last lines that a program wrote."""
        text = (self.folder / f"{program}.log").read_text(errors="replace")
        return " | ".join(text.strip().splitlines()[-lines:])

    def _write_kubeconfig(self) -> None:
        self.write_kubeconfig(self.kubeconfig, self.token)

    def write_kubeconfig(self, path: Path, token: str, server: str | None = None) -> None:
        """A kubeconfig for the holder of a token."""
        config: Mapping[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "test", "cluster": {"server": server or self.server, "insecure-skip-tls-verify": True}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(json.dumps(config))


def no_questions_asked() -> ssl.SSLContext:
    # The server makes its own certificate; loopback and a fresh token are what protects it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """For `preexec_fn`: the new process ends with the thread that starts it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

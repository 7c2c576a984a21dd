"""Starting a cluster and ending it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from testcluster import addons, building, certificates, cgroups, control, images, layout, preconditions
from testcluster.commands import CommandFailedError
from testcluster.layout import Cluster, ClusterNode
from testcluster.namespaces import in_own_namespaces, inside
from testcluster.programs import Programs, find

ENVIRONMENT = building.ROOT / ".venv"
START_SECONDS = 300.0
END_SECONDS = 20.0


def up(folder: Path, workers: int, say: Callable[[str], None], *, packaged: bool | None = None) -> Cluster:
    """Starts a cluster and installs what belongs into it; one that runs already gets today's operator and chart.

    Args:
        packaged: jobs start from the trainer's image (6 GB, which is built and brought into every node); if not, from
            a small one, and mount the checkout with its environment. None: as it is in a cluster that runs; a new one
            has the small image.

    Raises:
        CommandFailedError, ProgramMissingError: it can't be started here; what was started is ended again.
    """
    preconditions.check()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if control.listener_of(folder / "hub.sock") is not None:
            say("the cluster runs already")
            return _renew(layout.load(folder), say, packaged=packaged)
        begun = time.monotonic()
        programs = find(build=True, say=say, cluster=True)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as api:
            port = api.getsockname()[1]
            cluster = Cluster(folder, workers, port, programs, _images(programs, say), bool(packaged))
            _prepare(cluster)
            hub = _start_hub(cluster, api)
        try:
            _wait_for_nodes(cluster, hub)
            say(f"{len(cluster.nodes)} nodes started after {time.monotonic() - begun:.0f} s; installing operators")
            if cluster.packaged:
                _bring_trainer(cluster, say)
            addons.install(cluster, ENVIRONMENT, trainer_image(cluster))
        except BaseException:
            _end(folder)
            raise
        say(f"the cluster is ready after {time.monotonic() - begun:.0f} s")
        return cluster


def down(folder: Path) -> bool:
    """Ends the cluster of a folder with everything in it. Images stay in the folder. False where nothing ran.

    Raises:
        CommandFailedError: something is still there after `END_SECONDS`.
    """
    if not folder.exists():
        return False
    with _locked(folder):
        return _end(folder)


def kill(node: ClusterNode) -> None:
    """Ends a node as a power cut would.

    Raises:
        KeyError: it doesn't run.
    """
    pid = control.listener_of(node.socket)
    if pid is None:
        raise KeyError(f"{node.name} doesn't run")
    os.kill(pid, signal.SIGKILL)
    _wait_for_end(pid)


def bring(cluster: Cluster, node: ClusterNode, *archives: Path) -> None:
    """Imports image archives into a node, those that it doesn't have.

    Raises:
        KeyError: it doesn't run.
    """
    pid = control.listener_of(node.socket)
    if pid is None:
        raise KeyError(f"{node.name} doesn't run")
    for archive in archives:
        images.Ctr(cluster, node, inside(pid)).bring(archive.resolve())


def _images(programs: Programs, say: Callable[[str], None]) -> tuple[Path, ...]:
    """Archives of what every node has; those that nothing has changed for aren't made again."""
    mounted = building.mounted_image(ENVIRONMENT)
    return (*addons.program_images(programs), mounted, building.project_image("operator", say))


def trainer_image(cluster: Cluster) -> str:
    """What jobs start from that name no image themselves."""
    return building.image_name("trainer") if cluster.packaged else building.MOUNTED_IMAGE


def _bring_trainer(cluster: Cluster, say: Callable[[str], None]) -> None:
    archive = building.project_image("trainer", say)
    for node in _running(cluster):
        say(f"importing the trainer image into {node.name}")
        bring(cluster, node, archive)


def _running(cluster: Cluster) -> list[ClusterNode]:
    return [node for node in cluster.nodes if control.listener_of(node.socket) is not None]


def _renew(cluster: Cluster, say: Callable[[str], None], *, packaged: bool | None) -> Cluster:
    """Renews volumes, and brings our images, chart and operator up to date with the checkout."""
    addons.renew_volumes(cluster, ENVIRONMENT)
    renewed = renewal(cluster, _images(cluster.programs, say), packaged=packaged)
    if renewed != cluster:
        # Saved first: a node that starts in between has to find archives that are there.
        renewed.save()
    if renewed.images != cluster.images:
        for node in _running(renewed):
            bring(renewed, node, *renewed.images)
    if renewed.packaged:
        _bring_trainer(renewed, say)
    addons.install_operator(renewed, trainer_image(renewed))
    if renewed.images != cluster.images:
        addons.restart_operator(renewed)
        say("its operator is renewed")
    return renewed


def renewal(cluster: Cluster, images: tuple[Path, ...], *, packaged: bool | None) -> Cluster:
    """A running cluster as it is to be; whether jobs start from the trainer's image stays unless it is said."""
    return replace(cluster, images=images, packaged=cluster.packaged if packaged is None else packaged)


def _prepare(cluster: Cluster) -> None:
    for part in ("certificates", "log"):
        shutil.rmtree(cluster.folder / part, ignore_errors=True)
    for node in cluster.nodes:
        for part in ("etcd", "log"):
            shutil.rmtree(node.folder / part, ignore_errors=True)
    (cluster.folder / "log").mkdir()
    certificates.make(cluster)
    cluster.save()


def _start_hub(cluster: Cluster, api: socket.socket) -> subprocess.Popen[bytes]:
    with (cluster.folder / "log" / "hub.log").open("ab") as log:
        return subprocess.Popen(
            in_own_namespaces("testcluster.hub", str(cluster.folder), str(api.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            pass_fds=[api.fileno()],
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """Nothing of the caller's shell reaches the cluster's programs, least of all its proxies."""
    here = str(Path(__file__).resolve().parents[1])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": here, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}


def _wait_for_nodes(cluster: Cluster, hub: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    first_processes: dict[str, int] = {}
    while waiting := [node for node in cluster.nodes if not node.ready.exists()]:
        if hub.poll() is not None:
            raise CommandFailedError(f"the hub ended: {_tail(cluster.folder / 'log' / 'hub.log')}")
        for node in waiting:
            # Asked once: a starting node doesn't take connections yet, and they would pile up.
            if node.name not in first_processes and (pid := control.listener_of(node.socket)):
                first_processes[node.name] = pid
            if node.name in first_processes and not _lives(first_processes[node.name]):
                raise CommandFailedError(f"{node.name} ended: {_tail(node.logs / 'node.log')}")
        if time.monotonic() > deadline:
            names = ", ".join(node.name for node in waiting)
            raise CommandFailedError(f"not started after {START_SECONDS:.0f} s: {names}; see {waiting[0].logs}")
        time.sleep(0.1)


def _end(folder: Path) -> bool:
    hub = control.listener_of(folder / "hub.sock")
    if hub is not None:
        os.kill(hub, signal.SIGKILL)
        _wait_for_end(hub)
    if (folder / "cluster.json").exists():
        cgroups.remove(layout.load(folder).cgroup)
    for socket_file in folder.glob("**/*.sock"):
        socket_file.unlink()
    return hub is not None


def _wait_for_end(pid: int) -> None:
    # The first process of a namespace is gone only after everything in it.
    deadline = time.monotonic() + END_SECONDS
    while _lives(pid):
        if time.monotonic() > deadline:
            raise CommandFailedError(f"process {pid} doesn't end")
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _tail(log: Path, lines: int = 3) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join(text.strip().splitlines()[-lines:]) or "without a word"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

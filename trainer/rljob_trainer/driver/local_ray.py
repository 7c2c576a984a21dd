"""Ray for one run: a private one on this machine, or the cluster that the driver was submitted to.

A private Ray keeps everything in a folder of its own, talks on the loopback device, and is gone afterwards.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from rljob_api.cluster import RAY_ENVIRONMENT
from rljob_trainer.errors import RLJobError

PRIVATE_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    # The default writes a token under the user's home, after which other local clusters refuse connections.
    "RAY_AUTH_MODE": "disabled",
    # Ray would otherwise rebuild a uv environment in every worker when started by `uv run`.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray's default of 15 would let anything else on the machine go before training.
    "RAY_worker_niceness": "0",
    # Actors of one process per core: more threads only get in each other's way.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Ranks would otherwise meet on the network that the host's name belongs to.
    "GLOO_SOCKET_IFNAME": next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), ""),
}

_PREFIX = "rljob-ray-"
_ATTEMPTS = 3
_log = logging.getLogger(__name__)


class RayStartError(RLJobError):
    """The private Ray does not come up (exit code 75: try again)."""

    exit_code = 75


@contextmanager
def ray_for_run(cpus: int) -> Iterator[None]:
    """Connects to the cluster that RAY_ADDRESS names, or starts a private Ray with ``cpus`` slots, stopped at the end.

    ``cpus`` are slots for actors, not cores: a machine with fewer cores runs them in turn.
    """
    if "RAY_ADDRESS" in os.environ:
        import ray

        ray.init(address="auto", log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
        return
    for name, value in PRIVATE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    with _private_folder() as folder:
        try:
            _start(folder, cpus)
            yield
        finally:
            ray.shutdown()


def _start(folder: Path, cpus: int) -> None:
    """Ray gives its own processes 30 seconds, which a machine that is busy with other things may exceed: so, again."""
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _as_no_argument_says():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(folder),
                )
            return
        except Exception as error:  # noqa: BLE001  Ray raises the bare class when its processes are late
            ray.shutdown()
            _log.warning("Ray did not start (attempt %d of %d): %s", attempt, _ATTEMPTS, error)
            reason = error
    raise RayStartError(
        f"Ray did not start in {_ATTEMPTS} attempts: {reason} Is the machine overloaded, or short of memory?"
    )


@contextmanager
def _as_no_argument_says() -> Iterator[None]:
    """What ``ray.init`` has no argument for (``ray start`` has, and takes twice as long).

    Ray runs whatever it is sent, and its servers listen where the node's address says: ``ray.init`` makes an address of
    the network of it, even of 127.0.0.1. Ray's agent wants one port of the machine, and when another Ray has it tries
    for 3 s before anything goes on: any port will do. Nobody reads what the autoscaler and the log monitor find, two
    Python processes of 60 MB, nor asks the dashboard's server, a third one of 120 MB that Ray starts and waits for even
    where there is to be no dashboard. That its libraries are there, which ``pyproject.toml`` says, costs a third of a
    second to see.
    """
    from ray._private import parameter, services, utils

    usual = parameter.RayParams
    ours = {
        "node_ip_address": "127.0.0.1",
        "dashboard_agent_listen_port": 0,
        "no_monitor": True,
        "include_log_monitor": False,
    }
    with (
        _replaced(parameter, "RayParams", lambda **said: usual(**{**said, **ours})),
        _replaced(services, "start_api_server", lambda *_, **__: (None, None)),  # as if it could not be started
        _replaced(utils, "get_dashboard_dependency_error", lambda: None),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, by: Callable[..., object]) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, usual)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for Ray's sockets and logs, removed afterwards, together with those that killed runs have left.

    Sockets live below it, and their paths may have 107 characters at most: hence /tmp and a short name.
    """
    for left in Path("/tmp").glob(f"{_PREFIX}*"):
        _remove_if_abandoned(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    """Its owner holds the lock for as long as it lives."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return  # just being made, or another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)

"""Ray for one run: a private one on this machine, or the cluster that the driver was submitted to.

A private Ray keeps everything in a folder that only its user may enter, talks on the loopback device with those alone
who have its token, and is gone afterwards, however the driver ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_api.cluster import RAY_ENVIRONMENT
from rljob_trainer.errors import RLJobError

PRIVATE_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
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

_PREFIX = "rljob-own-"
_ATTEMPTS = 3
_TOKEN = "token"
_RAYS = "r"
"""Ray's own part of the folder, which it opens to everybody; the short name leaves room for the paths of sockets."""
_MODE, _TOKEN_TEXT, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ENDS_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(os.environ.get('RAY_RAYLET_PID', os.getppid())): sys.exit(1)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes another one, which the kernel ends together with who started it."""
_log = logging.getLogger(__name__)


class RayStartError(RLJobError):
    """The private Ray does not come up (exit code 75: try again)."""

    exit_code = 75


@contextmanager
def ray_for_run(cpus: int, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Connects to the cluster that RAY_ADDRESS names, or starts a private Ray with ``cpus`` slots, stopped at the end.

    ``cpus`` are slots for actors, not cores: a machine with fewer cores runs them in turn. A start that fails is tried
    again as long as it ``is_wanted``. Raises ``RayStartError``.
    """
    if "RAY_ADDRESS" in os.environ:
        import ray

        with _without_complaints_of_signals():
            ray.init(address="auto", log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
        return
    for name, value in PRIVATE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    with _private_folder() as folder, _token_of_its_own(folder):
        rays = folder / _RAYS
        rays.mkdir()
        try:
            _start(rays, cpus, is_wanted)
            yield
        finally:
            ray.shutdown()


@contextmanager
def _token_of_its_own(folder: Path) -> Iterator[None]:
    """Ray refuses whoever does not have the token. It is in a file: Ray's default lies under the user's home, where all
    other clusters would find it and refuse their own clients.

    Whatever the environment says of authentication is meant for other clusters, and holds again afterwards.
    """
    file = folder / _TOKEN
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(secrets.token_hex(32))
    before = {name: os.environ.pop(name, None) for name in (_MODE, _TOKEN_TEXT, _TOKEN_FILE)}
    os.environ |= {_MODE: "token", _TOKEN_FILE: str(file)}
    _authenticate_anew()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _authenticate_anew()


def _authenticate_anew() -> None:
    """Ray looks at the environment once."""
    from ray import _raylet

    compiled: Any = _raylet  # without types
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


def _start(folder: Path, cpus: int, is_wanted: Callable[[], bool]) -> None:
    """Ray gives its own processes 30 seconds, which a machine that is busy with other things may exceed: so, again."""
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _as_no_argument_says(), _without_complaints_of_signals():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(folder),
                )
            return
        except Exception as error:  # Ray raises the bare class when its processes are late
            ray.shutdown()
            if not is_wanted():
                raise RayStartError(f"Ray did not start: {error}") from error
            _log.warning("Ray did not start (attempt %d of %d): %s", attempt, _ATTEMPTS, error)
            reason = error
    raise RayStartError(
        f"Ray did not start in {_ATTEMPTS} attempts: {reason} The machine may be overloaded or short of memory."
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

    usual, agent = parameter.RayParams, services._build_python_executable_command_memory_profileable
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
        _replaced(services, agent.__name__, lambda *said, **named: _ending_with_parent(agent(*said, **named))),
    ):
        yield


@contextmanager
def _without_complaints_of_signals() -> Iterator[None]:
    """Signals are the driver's business; Ray says that it cannot take them in a thread."""
    from ray._private.worker import logger

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("SIGTERM handler is not set")

    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def _ending_with_parent(command: list[str]) -> list[str]:
    """``command``, for a process that does not outlive its parent; elsewhere than on Linux as it is."""
    return [sys.executable, "-ISc", _ENDS_WITH_PARENT, *command] if sys.platform == "linux" else command


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
    """A folder for Ray's sockets and logs, removed afterwards, together with those that killed runs have left. Only its
    owner may enter it, so that nobody else can put anything in the place of what is there.

    Sockets live below it, and their paths may have 107 characters at most: hence /tmp and a short name.
    """
    for left in Path("/tmp").glob(f"{_PREFIX}*"):
        _remove_if_abandoned(left)
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it. The lock is on the folder itself: it cannot be replaced. Raises
    ``RayStartError``."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        except OSError as error:
            raise RayStartError(
                f"cannot create a folder for Ray's sockets and logs in /tmp: {error.strerror or error}; make /tmp "
                "writable and make room in it"
            ) from error
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Before it was locked another run may have taken it for abandoned.
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    """Its owner holds the lock for as long as it lives. What belongs to other users is left alone, whoever asks."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone meanwhile, no folder, or another user's
    try:
        is_own = os.fstat(lock).st_uid == os.geteuid()
        if is_own and stat.S_IMODE(os.fstat(lock).st_mode) == 0o700:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)

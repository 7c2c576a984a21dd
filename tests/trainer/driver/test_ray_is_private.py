"""A private Ray is its user's alone, and ends with its driver, however that ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rljob_trainer.driver import local_ray

NOBODY = 65534
DRIVER = """
import os, sys, time
import ray
from rljob_trainer.driver.local_ray import ray_for_run
with ray_for_run(cpus=1):
    ray.get(ray.remote(num_cpus=0)(lambda: 1).remote())
    node = ray._private.worker._global_node
    print(node.get_session_dir_path(), node.gcs_address, flush=True)
    sys.stdin.readline()
"""
INTRUDER = """
import os, sys
os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", "0" * 64
from ray._raylet import GcsClient
folder, address, user = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.setgid(user); os.setuid(user)
try:
    print("entered", os.listdir(folder))
except PermissionError:
    print("the folder is closed")
try:
    client = GcsClient(address=address)
    print("read", client.internal_kv_keys(b"", namespace=b"fun", timeout=5))
except BaseException as error:
    print("refused:", error)
"""


class Driver:
    """A process with a private Ray, and everything below it."""

    def __init__(self, home: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        # What others have set for their clusters is not for this one.
        environment |= {"HOME": str(home), "RAY_AUTH_MODE": "disabled"}
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        session, self.address = self.process.stdout.readline().split()
        self.folder = Path(session).parents[1]
        self.below = psutil.Process(self.process.pid).children(recursive=True)

    def names(self) -> set[str]:
        """Of those below that still run."""
        running = set()
        for process in self.below:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    running.add(process.name())
        return running

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for process in self.below:
            with suppress(psutil.NoSuchProcess):  # which knows a process by its number and its start
                process.kill()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    started = Driver(tmp_path_factory.mktemp("home"))
    yield started
    started.close()


def test_only_its_user_may_enter_the_folder_or_read_the_token(driver: Driver) -> None:
    assert stat.S_IMODE(driver.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((driver.folder / "token").stat().st_mode) == 0o600
    assert not (driver.home / ".ray").exists()  # where a token would be for all other clusters


def test_another_user_neither_enters_nor_calls(driver: Driver) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    arguments = [str(driver.folder), driver.address, str(NOBODY)]
    intruder = subprocess.run(
        [sys.executable, "-c", INTRUDER, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    said = intruder.stdout.splitlines()
    assert said[0] == "the folder is closed", intruder
    assert said[1:], intruder
    assert said[1].startswith("refused:"), intruder
    assert "token" in said[1].lower() or "auth" in said[1].lower()


def test_agents_end_with_a_driver_that_is_killed(driver: Driver) -> None:
    """The last one here: it ends the driver."""
    assert len(driver.names()) >= 4
    driver.process.send_signal(signal.SIGKILL)
    driver.process.wait()
    deadline = time.monotonic() + 30
    while driver.names() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert driver.names() == set()


def test_a_folder_that_is_in_use_is_kept_and_one_that_was_left_is_removed() -> None:
    with local_ray._private_folder() as used:
        left, lock = local_ray._locked_folder()
        os.close(lock)
        with local_ray._private_folder():
            assert used.exists()
            assert not left.exists()
    assert not used.exists()


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user takes root")
    other, lock = local_ray._locked_folder()
    os.close(lock)
    os.chown(other, NOBODY, NOBODY)
    link = other.with_name(f"{other.name}-link")
    link.symlink_to(tmp_path, target_is_directory=True)
    try:
        local_ray._remove_if_abandoned(other)
        local_ray._remove_if_abandoned(link)
        assert other.exists()
        assert tmp_path.exists()
    finally:
        link.unlink()
        other.rmdir()

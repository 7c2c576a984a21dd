"""What tests of several folders share: an object store (moto's S3 server, a process of its own), Ray's workers from a
process that forks them, the clock of CI, and which of them run in one of the processes that share them out."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import again
import pytest
import repeatable
import slow
import timings
from warm_workers import fork_workers, forking
from xdist.scheduler import LoadScopeScheduling


@dataclass
class ObjectStore:
    """A running server with one empty bucket, and what a client of it has in its environment."""

    url: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def place(self) -> str:
        """An address under which nothing is yet."""
        return f"s3://bucket/{uuid4().hex}"


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """The environment of this process is that of a client while tests run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = tmp_path_factory.mktemp("s3") / "server.log"
    command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with printed.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    store = ObjectStore(f"http://127.0.0.1:{port}", process)
    try:
        _make_bucket(store, printed)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in store.environment.items():
                patch.setenv(name, value)
            yield store
    finally:
        process.kill()
        process.wait()


def _make_bucket(store: ObjectStore, printed: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            request = urllib.request.Request(f"{store.url}/bucket", method="PUT")
            with urllib.request.urlopen(request, timeout=10):
                return
        except OSError:
            if store.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"moto's server does not answer:\n{printed.read_text()}") from None
            time.sleep(0.05)


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[str]:
    """The workers of every Ray that this process starts from now on are forked (``warm_workers``), by who listens at
    that address."""
    with tempfile.TemporaryDirectory(prefix="rljob-", dir="/tmp") as folder, forking(folder) as address:
        fork_workers(address)
        yield address


def pytest_addoption(parser: pytest.Parser) -> None:
    slow.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Where CI asks for it, the run says what its tests cost, and runs what failed again, alone."""
    repeatable.set_up_hypothesis()
    timings.configure(config)
    again.configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    repeatable.seed(item.nodeid)


def pytest_collection_finish() -> None:
    """What has been imported stays: collecting garbage while tests run need not look through it each time, which took
    up to a sixth of the time of tests that make many objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.select(config, items)


class Together(LoadScopeScheduling):
    """What is set up for a file is set up once, and what takes seconds to import is imported once: the tests of a file
    go to one process, and all those that want vLLM to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "vllm" if "/test_vllm_" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together | None:
    return Together(config, log) if config.option.dist == "loadfile" else None

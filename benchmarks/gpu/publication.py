"""Weights from a learner's process into an engine's, by gloo, NCCL or CUDA IPC: GB/s beside a bare broadcast (IPC: a
copy) of the same bytes, and what becomes of the learner when the engine dies while they travel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.processes import as_engine
from rljob_trainer.errors import RLJobError
from rljob_trainer.stores import reach_store, serve_store
from rljob_trainer.weights.group import WeightLink, call_off
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.receiver import Receiver
from rljob_trainer.weights.sender import SENDER, Publisher

dist: Any = torch.distributed
SECONDS = 20.0
ROUNDS = 3


def weights(device: torch.device, layers: int, width: int, inner: int, vocabulary: int) -> dict[str, Tensor]:
    """Parameters in bfloat16 with the shapes of a Qwen2 of this size."""
    shapes = {"embed": (vocabulary, width)}
    for number in range(layers):
        shapes |= {f"{number}.{name}": (width, width) for name in ("query", "output")}
        shapes |= {f"{number}.{name}": (256, width) for name in ("key", "value")}
        shapes |= {f"{number}.{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{number}.down": (width, inner), f"{number}.norm": (width,)}
    return {name: torch.ones(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


class Pair:
    """The sender, in this process, and a receiver in one of its own: with NCCL on the second GPU, with IPC on the
    same."""

    def __init__(self, device: str, backend: str, *, dies: bool) -> None:
        self.backend = backend
        on_device = backend == "nccl" or (backend == "ipc" and device == "cuda")
        self.device = torch.device("cuda", 0) if on_device else torch.device("cpu")
        shape = (28, 1536, 8960, 151936) if device == "cuda" else (2, 512, 2048, 65536)
        self.named = weights(torch.device("cuda", 0) if device == "cuda" else self.device, *shape)
        self.metas = describe(self.named.items())
        self.nbytes = sum(meta.nbytes for meta in self.metas)
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far_end = spawn.Pipe()
        self.publisher = Publisher(256 << 20, "127.0.0.1", self.device)
        self.link = WeightLink(self.publisher.address, 1, (SENDER, "the engine"), backend)
        self._bare_store, bare_address = serve_store("127.0.0.1")
        arguments = (far_end, self.link, bare_address, self.nbytes, str(self.device), dies)
        self.process = spawn.Process(target=receiver_process, args=arguments, daemon=True)
        own = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[1] if backend == "nccl" else None
        with as_engine(own):
            self.process.start()
        far_end.close()
        self.publisher.connect(self.link, SECONDS)

    def bare(self) -> float:
        """Seconds of one broadcast of all bytes; the median of some."""
        if self.backend == "ipc":
            return copies(self.device, self.nbytes)
        group = new_group(self._bare_store, 0, self.backend)
        return broadcasts(group, self.device, self.nbytes)

    def publish(self, version: int) -> float:
        return self.publisher.publish(self.metas, self.named.items(), version, SECONDS).seconds


def receiver_process(
    pipe: Connection, link: WeightLink, bare_address: str, nbytes: int, place: str, dies: bool
) -> None:
    """Receives ``ROUNDS`` publications into memory of its own, or kills itself when the first bytes have come."""
    device = torch.device(place)
    receiver = Receiver(link, 1, timeout=SECONDS, device=device)

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        if dies:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in tensors:
            pass

    with suppress(EOFError):
        if not dies and link.backend != "ipc":
            group = new_group(reach_store(bare_address, timedelta(seconds=SECONDS)), 1, link.backend)
            broadcasts(group, device, nbytes)
        for version in range(1, ROUNDS + 2):
            receiver.receive(version, load, lambda name: None, SECONDS)
        pipe.recv()


def new_group(store: Any, rank: int, backend: str) -> Any:
    """A process group of two that is nobody's default."""
    store = dist.PrefixStore("bare", store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=SECONDS)
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def broadcasts(group: Any, device: torch.device, nbytes: int) -> float:
    """Median seconds of a broadcast of one buffer, after one that is not counted."""
    buffer, flag = torch.zeros(nbytes, dtype=torch.uint8, device=device), torch.zeros(1, device=device)
    seconds = []
    for _ in range(1 + ROUNDS):
        group.allreduce([flag]).wait()
        _settle(device)
        started = time.perf_counter()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([buffer], options).wait()
        group.allreduce([flag]).wait()
        _settle(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def copies(device: torch.device, nbytes: int) -> float:
    """Median seconds of a copy of one buffer, after one that is not counted."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(1 + ROUNDS):
        _settle(device)
        started = time.perf_counter()
        target.copy_(source)
        _settle(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(writer: Writer, device: str, backend: str) -> None:
    pair = Pair(device, backend, dies=False)
    bare = pair.bare()
    what = "copy" if backend == "ipc" else f"broadcast by {backend}"
    writer.plain(f"bare {what}", pair.nbytes / 1e9 / bare, "GB/s")
    seconds = [pair.publish(version) for version in range(1, ROUNDS + 2)][1:]
    writer.plain(f"publication by {backend}", pair.nbytes / 1e9 / median(seconds), "GB/s")
    writer.plain(f"publication by {backend}, share of the bare {what.split()[0]}", bare / median(seconds))
    pair.pipe.send("end")
    pair.process.join(5)


def measure_death(writer: Writer, device: str, backend: str) -> None:
    """What the driver does when it sees that an engine's process is gone is done here by a thread: calling off."""
    pair = Pair(device, backend, dies=True)

    def watch() -> None:
        pair.process.join()
        call_off(pair.link, "the engine's process is gone")

    threading.Thread(target=watch, daemon=True).start()
    failed = False
    try:
        pair.publish(1)
    except RLJobError:
        failed = True
    ended = time.monotonic()
    writer.at_least(f"engine killed while {backend} sends: the learner is told (1: yes)", float(failed), 1.0)
    # Monotonic time is one clock for all processes of a Linux machine.
    writer.at_most(f"from the engine's death to the learner's error ({backend})", ended - pair.pipe.recv(), 15.0, "s")

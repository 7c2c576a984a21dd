"""The engine's process: builds a real engine and receives, as it is told through a pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as distributed
from torch import Tensor

from benchmarks.publication.resident import PeakMemory
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.weights import receiver as receiving
from rljob_trainer.weights.receiver import Receiver

TIMEOUT = 600.0
dist: Any = distributed  # stores are missing from its type annotations


@dataclass(frozen=True, slots=True)
class Received:
    """What a publication cost the engine, from the start of the update until the version is served."""

    seconds: float
    extra_bytes: int


def receiver_process(pipe: Connection, kind: Any, folder: str) -> None:
    """Serves one benchmark; ends at "end"."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    engine = build_engine(EngineSpec(kind, folder, max_context=512))
    pipe.send("ready")
    members: list[Receiver] = []
    while True:
        command, argument = pipe.recv()
        if command == "join":
            members.append(Receiver(argument, 1, timeout=TIMEOUT, keeps=kind == "vllm"))
            pipe.send("joined")
        elif command == "raw group":
            store = dist.TCPStore("127.0.0.1", argument, is_master=False)
            dist.init_process_group("gloo", store=store, rank=1, world_size=2)
            pipe.send("joined")
        elif command == "raw":
            buffer = torch.zeros(argument, dtype=torch.uint8)
            dist.barrier()
            dist.broadcast(buffer, 0)
            dist.barrier()
            pipe.send("received")
        elif command == "receive":
            version, checksums = argument
            pipe.send(receive(engine, members[0], version, checksums))
        else:
            engine.close()
            dist.destroy_process_group()
            return


def receive(engine: Engine, member: Receiver, version: int, checksums: bool) -> Received:
    """One publication into ``engine``; without ``checksums`` none are computed."""
    parameters: dict[str, Tensor] = getattr(engine, "parameters", {})
    with PeakMemory() as memory, checksumming(receiving, checksums):
        started = time.perf_counter()
        engine.begin_update()
        member.receive(version, engine.load, parameters.get, TIMEOUT)
        engine.finish_update(version)
        seconds = time.perf_counter() - started
    return Received(seconds, memory.extra_bytes)


@contextmanager
def checksumming(side: ModuleType, on: bool) -> Iterator[None]:
    """Inside, sender or receiver computes checksums or, when not ``on``, takes 0 for each."""
    with nullcontext() if on else patch.object(side, "checksum", lambda tensor: 0):
        yield

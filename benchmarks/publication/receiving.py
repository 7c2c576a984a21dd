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

from benchmarks.publication.raw import RawGroup, empty
from benchmarks.resident import PeakMemory
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.weights import receiver as receiving

TIMEOUT = 600.0


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
    raw: RawGroup | None = None
    pipe.send("ready")
    while True:
        command, argument = pipe.recv()
        if command == "join":
            engine.join_weights(argument, 1, TIMEOUT)
            pipe.send("joined")
        elif command == "raw group":
            raw = RawGroup(rank=1, port=argument)
            raw.open()
            pipe.send("joined")
        elif command == "raw":
            assert raw is not None
            raw.broadcast(empty(argument))
            pipe.send("received")
        elif command == "receive":
            version, checksums = argument
            pipe.send(receive(engine, version, checksums))
        else:
            engine.close()
            return


def receive(engine: Engine, version: int, checksums: bool) -> Received:
    """One publication into ``engine``; without ``checksums`` none are computed."""
    with PeakMemory() as memory, checksumming(receiving, checksums):
        started = time.perf_counter()
        engine.receive_weights(version, TIMEOUT)
        seconds = time.perf_counter() - started
    return Received(seconds, memory.extra_bytes)


@contextmanager
def checksumming(side: ModuleType, on: bool) -> Iterator[None]:
    """Inside, sender or receiver computes checksums or, when not ``on``, takes 0 for each."""
    with nullcontext() if on else patch.object(side, "checksum", lambda tensor: 0):
        yield

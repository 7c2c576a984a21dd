"""The engine's process: builds a real engine and receives, as it is told through a pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.publication.raw import RawGroup, empty
from benchmarks.resident import PeakMemory
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.weights import receiver as receiving
from rljob_trainer.weights.manifest import Addition, Manifest
from rljob_trainer.weights.plan import TensorMeta, describe

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
            version, adds_up = argument
            pipe.send(receive(engine, version, adds_up))
        else:
            engine.close()
            return


def receive(engine: Engine, version: int, adds_up: bool) -> Received:
    """One publication into ``engine``; without ``adds_up`` no sum is taken."""
    with PeakMemory() as memory, adding_up(receiving, adds_up):
        started = time.perf_counter()
        engine.receive_weights(version, TIMEOUT)
        seconds = time.perf_counter() - started
    return Received(seconds, memory.extra_bytes)


class Nothing(Addition):
    """Takes no sums: every manifest has 0 for each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[TensorMeta] = []

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._names += describe(named)

    def manifest(self) -> Manifest:
        return Manifest((meta, 0) for meta in self._names)


@contextmanager
def adding_up(side: ModuleType, on: bool) -> Iterator[None]:
    """Inside, sender or receiver adds up what it sends or receives or, when not ``on``, takes 0 for each tensor."""
    with nullcontext() if on else patch.object(side, "Addition", Nothing):
        yield

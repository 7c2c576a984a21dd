"""An engine's side of a publication: receive buckets while the one before is added up and loaded.

What the engine lets us write in place is received there and never exists twice.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.errors import EngineError
from rljob_trainer.weights.blocks import block_of, lay_out
from rljob_trainer.weights.group import INTERRUPTED, CalledOffError, WeightGroup, WeightLink, dist
from rljob_trainer.weights.manifest import Addition, Manifest, Version
from rljob_trainer.weights.plan import Bucket, TensorMeta, WeightPlan
from rljob_trainer.weights.residence import listed

Load = Callable[[Iterable[tuple[str, Tensor]]], None]
Destination = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """What a publication cost one receiver."""

    version: Version
    """With the manifest of what arrived, which is that of what was sent."""
    nbytes: int
    seconds: float
    manifest_seconds: float
    """For adding it up."""
    peak_buffer_bytes: int
    """Most memory held at once beyond the model itself."""
    pause_seconds: float = 0.0
    """For how long the engine made no token because of it: known to whoever drives the engine."""


class Receiver:
    """Member ``rank`` of a weight group. Not thread-safe."""

    def __init__(self, link: WeightLink, rank: int, *, timeout: float, device: torch.device | str = "cpu") -> None:
        """Joins the group. Raises ``DeadlineError`` when the others do not."""
        self._device = torch.device(device)
        self._name = link.names[rank]
        self._group = WeightGroup(*link.seat(rank), timeout=timeout, device=self._device)
        self._plan: WeightPlan | None = None
        self._round = 0
        self.manifest: Manifest | None = None
        """Of the last publication that arrived whole."""

    def receive(self, version: int, load: Load, destination: Destination, timeout: float) -> ReceiveReport:
        """Receives a publication and gives it to ``load``, some tensors at a time. Nothing is written into them later:
        an engine may hold on to them until a layer is complete.

        A tensor for which ``destination`` returns a contiguous one of the same shape and dtype is received there; those
        that travel in one pack are moved into one block of memory first (``blocks.py``).
        Raises ``EngineError`` when the sender is lost or what arrived has another manifest than what was sent, naming
        the tensors, and ``DeadlineError`` when the publication does not begin in time. The generation is over then:
        join the next one.
        """
        started = time.monotonic()
        deadline = started + timeout
        group = self._group
        self._round += 1
        self.manifest = None
        try:
            self._plan = self._read_plan(version, deadline)
            group.post(f"{self._round}/ready", "")
            incoming = _Incoming(group, self._plan, destination, self._device)
            for tensors in incoming.receive(deadline):
                load(tensors)
            group.rest()
            received = incoming.manifest()
            self._compare(
                self._plan, received, group.read(f"{self._round}/manifest", deadline, "the sender's manifest")
            )
        except BaseException as error:
            innocent = isinstance(error, ConnectionError | CalledOffError)
            # The store may be gone with the learner.
            with suppress(dist.DistError):
                group.post(f"{self._round}/done", INTERRUPTED if innocent else f"{type(error).__name__}: {error}")
            self.close()
            if isinstance(error, ConnectionError):
                problem = f"weights: {self._name} lost the sender while receiving version {version} ({error})"
                raise EngineError(problem) from error
            raise
        self.manifest = received
        group.post(f"{self._round}/done", "ok")
        seconds = time.monotonic() - started
        return ReceiveReport(
            received.version(version),
            self._plan.nbytes,
            seconds,
            incoming.manifest_seconds,
            incoming.peak_buffer_bytes,
        )

    def _read_plan(self, version: int, deadline: float) -> WeightPlan:
        said = self._group.read(f"{self._round}/plan", deadline, f"the publication of version {version}").decode()
        coming, _, text = said.partition(":")
        if int(coming) != version:
            raise EngineError(f"weights: {self._name} expects version {version}, but the learner publishes {coming}")
        plan = WeightPlan.from_json(text) if text else self._plan
        if plan is None:
            raise EngineError(f"weights: {self._name} never received the plan of its weight group")
        return plan

    def _compare(self, plan: WeightPlan, received: Manifest, sums: bytes) -> None:
        sent = Manifest(zip(plan.tensors, json.loads(sums), strict=True))
        if wrong := received.differing(sent):
            raise EngineError(
                f"weights: {self._name} received different bytes than were sent, in {len(wrong)} of {len(sent.lines)} "
                f"tensors: {listed(wrong)}"
            )

    def close(self) -> None:
        """Leaves the group."""
        self._group.close()


class _Incoming:
    """One publication as it arrives: at most a bucket's worth that travels, and the bucket that is being loaded."""

    def __init__(self, group: WeightGroup, plan: WeightPlan, destination: Destination, device: torch.device) -> None:
        self._group, self._plan, self._destination, self._device = group, plan, destination, device
        self._bytes_held = 0
        self._addition = Addition()
        self.manifest_seconds = 0.0
        self.peak_buffer_bytes = 0

    def receive(self, deadline: float) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors in the order of the plan. Raises ``ConnectionError`` when the broadcast breaks off."""
        coming = deque(self._plan.buckets)
        travelling: deque[tuple[Bucket, Any, Tensor, int]] = deque()
        budget = self._plan.budget(self._device)
        bytes_travelling = 0

        def receive_more() -> None:
            nonlocal bytes_travelling
            while coming and (not travelling or bytes_travelling + coming[0].nbytes <= budget):
                bucket = coming.popleft()
                data, held = self._memory(bucket)
                travelling.append((bucket, self._group.broadcast(data), data, held))
                bytes_travelling += bucket.nbytes

        receive_more()
        while travelling:
            bucket, work, data, held = travelling.popleft()
            self._group.wait(work, deadline)
            bytes_travelling -= bucket.nbytes
            # What comes next travels while this is added up and loaded.
            receive_more()
            tensors = bucket.views(data)
            started = time.perf_counter()
            self._addition.add(tensors)
            self.manifest_seconds += time.perf_counter() - started
            yield tensors
            self._bytes_held -= held

    def manifest(self) -> Manifest:
        """The manifest of what arrived."""
        started = time.perf_counter()
        manifest = self._addition.manifest()
        self.manifest_seconds += time.perf_counter() - started
        return manifest

    def _memory(self, bucket: Bucket) -> tuple[Tensor, int]:
        """Where a bucket is received, ``[nbytes]`` of uint8, and how many bytes had to be allocated for it."""
        targets = [self._target(meta) for meta in bucket.tensors]
        if (own := [target for target in targets if target is not None]) and len(own) == len(targets):
            if len(own) == 1:
                return own[0].view(-1).view(torch.uint8), 0
            block = block_of(own, bucket)
            return lay_out(own, bucket) if block is None else block, 0
        self._bytes_held += bucket.nbytes
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, self._bytes_held)
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device), bucket.nbytes

    def _target(self, meta: TensorMeta) -> Tensor | None:
        """The engine's own tensor, if it can be written as it is."""
        target = self._destination(meta.name)
        if target is None or not target.is_contiguous() or target.device.type != self._device.type:
            return None
        return target if (tuple(target.shape), target.dtype) == (meta.shape, meta.dtype) else None

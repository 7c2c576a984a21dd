"""An engine's side of a publication: receive a bucket while the one before is verified and loaded.

What the engine lets us write in place is received there and never exists twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.errors import EngineError
from rljob_trainer.weights.checksum import checksum
from rljob_trainer.weights.group import INTERRUPTED, CalledOffError, WeightGroup, WeightLink
from rljob_trainer.weights.plan import Bucket, WeightPlan

Load = Callable[[Iterable[tuple[str, Tensor]]], None]
Destination = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """What a publication cost one receiver."""

    version: int
    nbytes: int
    seconds: float
    checksum_seconds: float
    peak_buffer_bytes: int
    """Most memory held at once beyond the model itself."""


class Receiver:
    """Member ``rank`` of a weight group. Not thread-safe."""

    def __init__(
        self, link: WeightLink, rank: int, *, timeout: float, device: torch.device | str = "cpu", keeps: bool = False
    ) -> None:
        """Joins the group. ``keeps``: the engine holds on to what it is given until a layer is complete, so every
        bucket comes in memory of its own; else two buffers serve in turn."""
        self._device = torch.device(device)
        self._group = WeightGroup(link, rank, timeout=timeout, device=self._device)
        self._name = link.names[rank]
        self._plan: WeightPlan | None = None
        self._keeps = keeps
        self._round = 0

    def receive(self, version: int, load: Load, destination: Destination, timeout: float) -> ReceiveReport:
        """Receives a publication and gives it to ``load``, some tensors at a time.

        A tensor for which ``destination`` returns a contiguous one of the same shape and dtype is received there.
        Raises ``EngineError`` when the sender is lost or the bytes differ from those sent, ``DeadlineError`` when the
        publication does not begin in time. The generation is over then: join the next one.
        """
        started = time.monotonic()
        deadline = started + timeout
        group = self._group
        self._round += 1
        try:
            self._plan = self._read_plan(version, deadline)
            group.post(f"{self._round}/ready", "")
            incoming = _Incoming(group, self._plan, destination, self._device, self._keeps)
            for tensors in incoming.receive(deadline):
                load(tensors)
            self._compare(
                self._plan, incoming.sums, group.read(f"{self._round}/sums", deadline, "the sender's checksums")
            )
        except BaseException as error:
            innocent = isinstance(error, ConnectionError | CalledOffError)
            group.post(f"{self._round}/done", INTERRUPTED if innocent else f"{type(error).__name__}: {error}")
            self.close()
            if isinstance(error, ConnectionError):
                problem = f"weights: {self._name} lost the sender while receiving version {version} ({error})"
                raise EngineError(problem) from error
            raise
        group.post(f"{self._round}/done", "ok")
        seconds = time.monotonic() - started
        return ReceiveReport(version, self._plan.nbytes, seconds, incoming.checksum_seconds, incoming.peak_buffer_bytes)

    def _read_plan(self, version: int, deadline: float) -> WeightPlan:
        said = self._group.read(f"{self._round}/plan", deadline, f"the publication of version {version}").decode()
        coming, _, text = said.partition(":")
        if int(coming) != version:
            raise EngineError(f"weights: {self._name} expects version {version}, but the learner publishes {coming}")
        plan = WeightPlan.from_json(text) if text else self._plan
        if plan is None:
            raise EngineError(f"weights: {self._name} never received the plan of its weight group")
        return plan

    def _compare(self, plan: WeightPlan, received: list[int], sent: bytes) -> None:
        pairs = zip(plan.buckets, json.loads(sent), received, strict=True)
        wrong = [bucket.tensors[0].name for bucket, theirs, ours in pairs if theirs != ours]
        if wrong:
            raise EngineError(
                f"weights: {self._name} received other bytes than were sent, in {len(wrong)} of {len(received)} "
                f"buckets, first at {wrong[0]}"
            )

    def close(self) -> None:
        """Leaves the group."""
        self._group.close()


class _Incoming:
    """One publication as it arrives: the bucket that travels and the one that is being loaded."""

    def __init__(
        self, group: WeightGroup, plan: WeightPlan, destination: Destination, device: torch.device, keeps: bool
    ) -> None:
        self._group, self._plan, self._destination, self._device = group, plan, destination, device
        self._keeps = keeps
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self.sums: list[int] = []
        self.checksum_seconds = 0.0
        self.peak_buffer_bytes = 0

    def receive(self, deadline: float) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors in the order of the plan. Raises ``ConnectionError`` when the broadcast breaks off."""
        buckets = self._plan.buckets
        travelling = self._start(0)
        for index, bucket in enumerate(buckets):
            following = self._start(index + 1) if index + 1 < len(buckets) else None
            work, data = travelling
            self._group.wait(work, deadline)
            started = time.perf_counter()
            self.sums.append(checksum(data))
            self.checksum_seconds += time.perf_counter() - started
            yield bucket.views(data)
            if following is not None:
                travelling = following

    def _start(self, index: int) -> tuple[Any, Tensor]:
        data = self._memory(self._plan.buckets[index], index % 2)
        return self._group.broadcast(data), data

    def _memory(self, bucket: Bucket, turn: int) -> Tensor:
        """Where a bucket is received: ``[nbytes]`` of uint8."""
        meta = bucket.tensors[0]
        if len(bucket.tensors) == 1:
            target = self._destination(meta.name)
            fits = target is not None and target.is_contiguous() and target.device.type == self._device.type
            if target is not None and fits and (tuple(target.shape), target.dtype) == (meta.shape, meta.dtype):
                return target.view(-1).view(torch.uint8)
        if self._keeps or self._buffers[turn].numel() < bucket.nbytes:
            self._buffers[turn] = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, sum(buffer.numel() for buffer in self._buffers))
        return self._buffers[turn][: bucket.nbytes]

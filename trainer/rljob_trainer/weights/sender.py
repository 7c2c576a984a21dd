"""The learner's side of a publication: gather, pack and send, bucket by bucket.

While one bucket's worth of bytes travels the next is gathered, packed and added up, so a whole-model copy never exists.
On a sharded learner all ranks iterate their parameters in step; only rank 0 has a ``Publisher``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.errors import EngineError
from rljob_trainer.stores import serve_store
from rljob_trainer.weights.blocks import block_of
from rljob_trainer.weights.group import WeightGroup, WeightLink
from rljob_trainer.weights.manifest import Addition, Manifest, Version
from rljob_trainer.weights.plan import Bucket, TensorMeta, WeightPlan

SENDER = "the learner"


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a publication cost the sender."""

    version: Version
    """With the manifest of what was sent."""
    nbytes: int
    seconds: float
    """From the first gather until the last receiver had loaded and verified everything."""
    manifest_seconds: float
    """For adding it up."""
    peak_buffer_bytes: int
    """Most memory held at once beyond the model itself."""


class Publisher:
    """Sends parameters to a changing set of engines.

    Usage::

        publisher = Publisher(bucket_bytes=256 << 20, host="127.0.0.1")
        publisher.connect(link, timeout=60)          # while every engine joins the same link
        publisher.publish(metas, named, version=1, timeout=60)   # while every engine receives version 1
    """

    def __init__(self, bucket_bytes: int, host: str, device: torch.device | str = "cpu") -> None:
        self.bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._store, self.address = serve_store(host)
        self._group: WeightGroup | None = None
        self._plan: WeightPlan | None = None
        self._round = 0

    def connect(self, link: WeightLink, timeout: float) -> None:
        """Opens a generation with ``link.names[1:]``. Raises ``DeadlineError`` naming who did not come."""
        self.disconnect()
        self._group = WeightGroup(link, 0, timeout=timeout, store=self._store, device=self._device)
        self._plan = None
        self._round = 0

    def disconnect(self) -> None:
        """Lets go of the present generation."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def publish(
        self, metas: Sequence[TensorMeta], named: Iterable[tuple[str, Tensor]], version: int, timeout: float
    ) -> SendReport:
        """Sends ``named``, which yields what ``metas`` describes, in that order.

        Raises ``DeadlineError`` when a receiver is not ready in time, ``EngineError`` when one is lost, cannot load, or
        holds other bytes than were sent; each names the engine. The generation is over then: connect again.
        """
        if self._group is None:
            raise EngineError("weights: no engine is connected; connect before publishing")
        group, started = self._group, time.monotonic()
        deadline = started + timeout
        known = self._plan is not None and self._plan.tensors == tuple(metas)
        if self._plan is None or not known:
            self._plan = WeightPlan(metas, self.bucket_bytes)
        # Rounds, not versions, number what is said: a version may be published twice.
        self._round += 1
        group.announce(f"{self._round}/plan", f"{version}:{'' if known else self._plan.to_json()}")
        try:
            group.gather(f"{self._round}/ready", deadline, f"start to receive version {version}")
            outgoing = _Outgoing(group, self._plan, deadline, self._device)
            try:
                for item in named:
                    outgoing.add(*item)
                outgoing.finish()
            except ConnectionError as error:
                raise group.blame(f"{self._round}/done", str(error)) from error
            manifest = outgoing.manifest()
            # Names, shapes and dtypes are in the plan, which both have.
            group.announce(f"{self._round}/manifest", json.dumps([manifest.sums[meta.name] for meta in metas]))
            answers = group.gather(f"{self._round}/done", deadline, f"finish loading version {version}")
            group.rest()
        except BaseException:
            self.disconnect()
            raise
        if failed := {name: answer for name, answer in answers.items() if answer != "ok"}:
            self.disconnect()
            raise EngineError("weights: " + "; ".join(f"{name}: {answer}" for name, answer in failed.items()))
        return SendReport(
            manifest.version(version),
            self._plan.nbytes,
            time.monotonic() - started,
            outgoing.manifest_seconds,
            outgoing.peak_buffer_bytes,
        )


class _Outgoing:
    """One publication on its way: at most a bucket's worth that travels, and the bucket that is being filled."""

    def __init__(self, group: WeightGroup, plan: WeightPlan, deadline: float, device: torch.device) -> None:
        self._group, self._deadline, self._device = group, deadline, device
        self._expected = iter(plan.tensors)
        self._home = {meta.name: pack for pack in plan.packs for meta in pack.tensors}
        self._gathered: list[Tensor] = []
        """Of the pack that is being filled."""
        self._budget = plan.budget(device)
        self._travelling: deque[tuple[Any, Tensor]] = deque()
        self._bytes_travelling = 0
        self._addition = Addition()
        self.manifest_seconds = 0.0
        self.peak_buffer_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes the next parameter; sends its bucket when that is complete."""
        meta = next(self._expected, None)
        if meta is None or (name, tuple(tensor.shape), tensor.dtype) != (meta.name, meta.shape, meta.dtype):
            raise EngineError(
                f"weights: the learner yielded {name} {tuple(tensor.shape)} {tensor.dtype} where its plan has {meta}"
            )
        pack = self._home.get(name)
        if pack is None:
            whole = tensor.detach().to(self._device).contiguous()
            self._send(whole.view(-1).view(torch.uint8), [(name, whole)])
            return
        self._gathered.append(tensor.detach())
        if len(self._gathered) == len(pack.tensors):
            data = self._packed(pack)
            self._send(data, pack.views(data))
            self._gathered = []

    def _packed(self, pack: Bucket) -> Tensor:
        """A pack's bytes: where its tensors lie, if they lie together, else a copy."""
        block = block_of(self._gathered, pack)
        if block is not None and block.device.type == self._device.type:
            return block
        self._arrive(self._budget - pack.nbytes)
        block = torch.empty(pack.nbytes, dtype=torch.uint8, device=self._device)
        for (_, place), tensor in zip(pack.views(block), self._gathered, strict=True):
            place.copy_(tensor)
        return block

    def _send(self, data: Tensor, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Adds up what leaves, and sends it."""
        started = time.perf_counter()
        self._addition.add(tensors)
        self.manifest_seconds += time.perf_counter() - started
        waiting = sum(tensor.nbytes for tensor in self._gathered)
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, self._bytes_travelling + waiting + data.numel())
        self._arrive(self._budget - data.numel())
        self._travelling.append((self._group.broadcast(data), data))
        self._bytes_travelling += data.numel()

    def _arrive(self, remaining: int) -> None:
        """Waits until at most ``remaining`` bytes travel."""
        while self._travelling and self._bytes_travelling > remaining:
            work, data = self._travelling.popleft()
            self._group.wait(work, self._deadline)
            self._bytes_travelling -= data.numel()

    def finish(self) -> None:
        """Waits for the last bucket. Raises ``EngineError`` when parameters are missing."""
        meta = next(self._expected, None)
        if meta is not None:
            raise EngineError(f"weights: the learner did not yield {meta.name}, which is in its plan")
        self._arrive(0)

    def manifest(self) -> Manifest:
        """The manifest of what was sent."""
        started = time.perf_counter()
        manifest = self._addition.manifest()
        self.manifest_seconds += time.perf_counter() - started
        return manifest

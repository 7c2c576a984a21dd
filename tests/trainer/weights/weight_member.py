"""A receiver in a process of its own, told what to do by JSON lines on its standard input."""

from __future__ import annotations

import itertools
import json
import sys
import time
import zlib
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rljob_trainer.errors import RLJobError
from rljob_trainer.weights.group import WeightGroup, WeightLink
from rljob_trainer.weights.receiver import Receiver

SHAPES = {
    "embed.weight": ((601, 900), torch.float32),  # 2.2 MB: travels alone
    "layers.0.norm": ((7,), torch.float32),
    "layers.0.scale": ((1,), torch.bfloat16),
    "layers.0.odd": ((3, 5, 7), torch.bfloat16),
    "layers.1.up": ((331, 257), torch.float32),
    "layers.1.down": ((257, 331), torch.bfloat16),
    "head.weight": ((523, 1024), torch.float32),
}


def model(version: int) -> dict[str, Tensor]:
    """Parameters that everybody can make for a version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def fingerprint(parameters: dict[str, Tensor]) -> dict[str, int]:
    """Of every byte, by another checksum than the one under test."""
    return {n: zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for n, t in parameters.items()}


def receive(receiver: Receiver, order: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
    direct = parameters if order.get("in_place") else {}

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
            if order.get("fail_at") == name:
                raise ValueError(f"cannot load {name}")
            if order.get("hang_at") == name:
                print(json.dumps({"hangs": True}), flush=True)
                time.sleep(60)

    wait = WeightGroup.wait
    received: list[Tensor] = []
    waits = itertools.count(1)
    broadcast = WeightGroup.broadcast

    def remember(group: WeightGroup, tensor: Tensor) -> Any:
        received.append(tensor)
        return broadcast(group, tensor)

    def corrupt(group: WeightGroup, work: Any, deadline: float) -> None:
        wait(group, work, deadline)
        if next(waits) == 2 and order.get("corrupt"):
            received[1][5] ^= 1

    with patch.object(WeightGroup, "wait", corrupt), patch.object(WeightGroup, "broadcast", remember):
        report = receiver.receive(order["version"], load, direct.get, order["timeout"])
    assert receiver.manifest is not None
    return {
        "fingerprint": fingerprint(parameters),
        "manifest": receiver.manifest.sha256,
        "peak": report.peak_buffer_bytes,
        "nbytes": report.nbytes,
    }


def main() -> None:
    torch.set_num_threads(1)
    receiver: Receiver | None = None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "join":
                link = WeightLink(order["address"], order["generation"], tuple(order["names"]), order["backend"])
                receiver = Receiver(link, order["rank"], timeout=order["timeout"])
                answer: dict[str, Any] = {"joined": True}
            else:
                assert receiver is not None
                answer = receive(receiver, order)
        except (RLJobError, ValueError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

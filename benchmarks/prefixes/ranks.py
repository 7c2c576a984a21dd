"""What a rank of the measurement does; started by name in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import interleaved
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import Share, cut

LOSS = LossSettings(policy_loss_params={"clip_low": 0.2, "clip_high": 0.2}, entropy_coefficient=0.01)
WAYS: dict[str, Callable[[SequenceBatch], Lengths]] = {
    "prefixes": Lengths.of,
    "prompts": lambda batch: Lengths.of_groups(
        batch.prompt_lengths, batch.response_lengths, np.zeros(len(batch), dtype=np.int64)
    ),
    "apart": lambda batch: Lengths.apart(batch.prompt_lengths, batch.response_lengths),
}


def measured(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, repetitions: int, queue: Any
) -> None:
    """Runs in a rank; the first one puts seconds by way, and its gradients' deviation, into ``queue``."""
    torch.set_num_threads(1)
    backend = Fsdp2()
    learner = backend.start(settings, rank, address, timeout_seconds=600)
    share = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings)).sent()[rank]
    shares: Mapping[str, Share] = {name: replace(share, lengths=of(batch)) for name, of in WAYS.items()}

    def gradient(name: str) -> float:
        for parameter in learner.actor.module.parameters():
            parameter.grad = None
        start = time.perf_counter()
        learner.gradient([learner.actor], shares[name], 0, LOSS)
        return time.perf_counter() - start

    found = {}
    for name in ("prefixes", "apart"):
        gradient(name)
        grads = [p.grad for p in learner.actor.module.parameters() if p.grad is not None]
        found[name] = torch.cat([full(grad).double().flatten() for grad in grads])
    deviation = float((found["prefixes"] - found["apart"]).norm() / found["apart"].norm())
    del found
    sides = {name: (lambda _, name=name: gradient(name)) for name in WAYS}
    seconds = interleaved(sides, repetitions)  # type: ignore[arg-type]
    if rank == 0:
        queue.put((seconds, deviation))

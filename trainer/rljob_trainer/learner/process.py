"""What every rank does first, whatever the backend: its device, its seed, the process group in which all ranks meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.stores import reach_store, serve_store


def prepare(settings: LearnerSettings) -> torch.device:
    """Seeds torch, allows it the kernels that the job allows, and returns the device: Ray shows each rank its own GPU
    only. Raises ``LearnerError`` where torch can use none."""
    device = torch.device("cuda", 0) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        if torch.version.cuda is None:
            raise LearnerError(
                f"the trainer has GPUs, but torch {torch.__version__} is a CPU build: use the GPU image "
                "(docker build --build-arg ACCELERATOR=gpu), or `make install ACCELERATOR=gpu`"
            )
        torch.cuda.set_device(device)
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        # Not "warn only": flash attention's backward pass would stay as it is.
        torch.use_deterministic_algorithms(True)
        details: Any = torch.utils.deterministic
        details.fill_uninitialized_memory = False
    return device


def meet(settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> None:
    """Makes torch's default process group of all ranks: gloo for what is in host memory, NCCL for what is on GPUs.

    ``address`` (host:port) is rank 0's. ``timeout_seconds`` bounds the meeting and every later collective.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if rank == 0:
        host, port = address.rsplit(":", 1)
        store, _ = serve_store(host, int(port), timeout)
    else:
        store = reach_store(address, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.ranks,
        timeout=timeout,
    )

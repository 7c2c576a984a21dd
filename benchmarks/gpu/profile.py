"""Where the device's time goes in scoring and in an update, kernel by kernel: what to mend when a goal is missed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.learner import filled, new_rank
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest

KERNELS = 15
_LONGEST_NAME = 100


def measure(writer: Writer, device: str, cache: Path) -> None:
    """The batch is that of the part ``learner``."""
    model, share, micro_batch_tokens = filled(cache, device)
    rank = new_rank(model, device, "bfloat16", micro_batch_tokens, reference=False)
    stages: dict[str, Callable[[], object]] = {
        "score": lambda: rank.score(share, ScoreRequest(log_probs=True)),
        "update": lambda: rank.update(share, LossSettings()),
    }
    for name, stage in stages.items():
        stage()
        alone = _seconds(stage, device)
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")) as profiled:
            _seconds(stage, device)
        writer.plain(f"profile: {name}", alone, "s")
        _write(writer, name, by_kernel(profiled.key_averages(), device), alone)
    rank.close()


def by_kernel(events: EventList, device: str) -> dict[str, tuple[float, int]]:
    """Seconds and calls of each kernel (of each operator on a CPU), longest first."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in events:
        if event.is_user_annotation:  # it spans what it names, which is counted itself
            continue
        if (event.device_type == torch.autograd.DeviceType.CUDA) is (device == "cuda"):
            spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            before, calls = found[event.key]
            found[event.key] = before + spent / 1e6, calls + event.count
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _write(writer: Writer, name: str, kernels: dict[str, tuple[float, int]], alone: float) -> None:
    """``alone``: seconds without a profiler, of which the rest is time in which the device has nothing to do."""
    busy = sum(seconds for seconds, _ in kernels.values())
    writer.plain(f"profile: {name}, share of the time in which the device works", min(1.0, busy / alone))
    for kernel, (seconds, calls) in list(kernels.items())[:KERNELS]:
        writer.plain(f"profile: {name}, {calls} x {kernel[:_LONGEST_NAME]}, share of its work", seconds / busy)


def _seconds(stage: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    stage()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started

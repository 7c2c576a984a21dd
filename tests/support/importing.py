"""Imports every module of the project on the Python that runs it, and holds what is installed against the pins.

Run by ``pythons.py`` in environments without an engine's build: what imports vLLM is left out there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = ("rljob_api", "rljob_trainer", "rljob_operator")
PINS = Path(__file__).parents[2] / "requirements" / "cpu.txt"
LEFT_OUT = {"vllm", "cloudpickle"}
"""The engine, and what comes with it."""


def import_all() -> tuple[int, list[str]]:
    """How many modules there are, and those that are left out. Raises what any other raises."""
    count, left_out = 0, []
    for package in PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if found.name.rpartition(".")[2] == "__main__":
                continue
            count += 1
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in LEFT_OUT:
                    raise
                left_out.append(found.name)
    return count, left_out


def unpinned() -> tuple[int, list[str]]:
    """How many packages are installed that the pins name, and which of them in another version, but for its build."""
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", PINS.read_text(), re.MULTILINE))
    installed = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in distributions()}
    named = sorted(installed.keys() & pinned.keys())
    return len(named), [
        f"{name} {installed[name]}, pinned to {pinned[name]}"
        for name in named
        if installed[name].partition("+")[0] != pinned[name].partition("+")[0]
    ]


def main() -> int:
    compared, others = unpinned()  # before some packages put what they carry of others on the path
    count, left_out = import_all()
    said = f" ({', '.join(left_out)} left out: no engine is here)" if left_out else ""
    print(f"Python {sys.version.split()[0]}: {count - len(left_out)} modules imported{said}")
    as_pinned = f"all {compared} packages that are installed are as pinned"
    print("\n".join(["NOT AS PINNED:", *others] if others else [as_pinned]))
    return 1 if others or not count or not compared else 0


if __name__ == "__main__":
    sys.exit(main())

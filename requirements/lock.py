"""Writes the constraints files: every version pinned, with hashes and without download addresses.

    .venv/bin/python requirements/lock.py            # after a change of pyproject.toml; what is pinned stays
    .venv/bin/python requirements/lock.py --upgrade  # everything as new as pyproject.toml allows

Constraints instead of uv.lock, because that file records the address of every download. torch alone carries no
hash: the same version is taken as a CPU build where one is offered and as the ordinary build elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
UNHASHED = {"torch"}

COMMON = [
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-header",
    "--no-annotate",
    "--python-version=3.11",
    "--python-platform=x86_64-unknown-linux-gnu",
]


def lock(output: str, extras: list[str], overrides: str | None) -> None:
    """Resolves ``pyproject.toml`` with the extras into ``requirements/<output>``."""
    target = HERE / output
    command = ["uv", "pip", "compile", "pyproject.toml", *COMMON, *(f"--extra={e}" for e in extras)]
    if overrides:
        command.append(f"--overrides={HERE.relative_to(ROOT) / overrides}")
    if "--upgrade" in sys.argv:
        command.append("--upgrade")
    # uv keeps the versions that it finds in its output.
    subprocess.run([*command, "--quiet", f"--output-file={target.relative_to(ROOT)}"], cwd=ROOT, check=True)
    target.write_text(without_hashes(target.read_text(), UNHASHED))


def without_hashes(text: str, names: set[str]) -> str:
    """Drops the ``--hash`` lines of the named packages from a compiled requirements file."""
    lines: list[str] = []
    dropping = False
    for line in text.splitlines():
        if not line.startswith(" "):
            dropping = line.split("==")[0] in names
            lines.append(line.removesuffix(" \\") if dropping else line)
        elif not dropping:
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    lock("cpu.txt", ["trainer", "cpu", "operator", "dev"], "cpu-overrides.txt")
    if "--all" in sys.argv:
        lock("gpu.txt", ["trainer", "gpu", "operator", "dev"], None)

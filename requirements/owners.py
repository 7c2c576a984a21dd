"""Files that two packages bring with different contents: which of them is there depends on what was installed last.

    .venv/bin/python requirements/owners.py    # after gpu.txt has changed; minutes, 13 GB of disk while it runs

Installs what gpu.txt pins into an environment that ends with the command, reads there what each package says it
brought, and writes gpu-owners.json. Tests hold that file against gpu.txt, whose packages they never install, and look
at their own environment themselves.
"""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from requirements import install
from requirements.lock import pins

RECORD = install.REQUIREMENTS / "gpu-owners.json"


def shared(packages: Iterable[Distribution]) -> dict[str, list[str]]:
    """The packages that bring a file, by its path, where two of them bring it with different contents."""
    contents: dict[str, dict[str, str]] = defaultdict(dict)
    for package in packages:
        name = package.metadata["Name"]
        for path, digest, _ in csv.reader((package.read_text("RECORD") or "").splitlines()):
            if digest:
                contents[path][name] = digest
    return {path: sorted(found) for path, found in sorted(contents.items()) if len(set(found.values())) > 1}


def pinned() -> str:
    """A digest of the names and versions in gpu.txt."""
    found = pins((install.REQUIREMENTS / "gpu.txt").read_text())
    versions = sorted(f"{name}=={version}" for name, (version, _) in found.items())
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "environment")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        settings = install.index_settings()
        extras = [f"--extra={extra}" for extra in ("trainer", "gpu", "operator", "dev")]
        command = install.install_command("gpu", settings, venv)
        install.run(*command, "--requirement", "pyproject.toml", *extras, environment=settings)
        found = shared(distributions(path=[str(path) for path in venv.glob("lib/python3.*/site-packages")]))
    RECORD.write_text(json.dumps({"pins": pinned(), "shared": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

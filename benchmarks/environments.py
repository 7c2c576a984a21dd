"""The peers' own virtual environments: made once in a cache folder, with pinned versions, by uv.

Nothing of a peer is ever installed into the project's own environment. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from requirements.install import index_settings

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = Path(__file__).with_name("peer-constraints.txt")
VERSION = "{}.{}".format(*sys.version_info)
"""The Python of the project's own environment, beside which some of it is imported."""
DEFAULT_CACHE = Path("~/.cache/rljob").expanduser()


@dataclass(frozen=True, slots=True)
class Peer:
    """What an environment holds; ``constrained``: all else has the versions of the constraints file, with hashes."""

    packages: tuple[str, ...]
    constrained: bool = True


PEERS: Mapping[str, Peer] = {
    "trl-grpo": Peer(("trl==1.16.0", "torch", "transformers", "accelerate", "datasets")),
    # trl.experimental.ppo is gone from 1.14 on.
    "trl-ppo": Peer(("trl==1.10.0", "torch", "transformers", "accelerate", "datasets")),
    # On a GPU: the newest vLLM that this release of TRL accepts, which asks for an older transformers.
    "trl-grpo-vllm": Peer(("trl==1.16.0", "vllm==0.31.0", "accelerate==1.15.0", "datasets==5.2.0"), constrained=False),
}


class EnvironmentMissingError(RuntimeError):
    """Something that has to be installed first is not there; the message says what to type."""


def peer_python(name: str, cache: Path) -> Path:
    """The interpreter of a peer's environment, which is made on the first call (minutes, up to 5 GB)."""
    folder = cache / "peers" / name
    python = folder / "bin" / "python"
    peer = PEERS[name]
    wanted = fingerprint(peer.packages)
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of {name} in {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    versions: list[str | Path] = [*_torch_backend(), "--constraints", CONSTRAINTS] if peer.constrained else []
    uv("venv", "--quiet", "--clear", "--python", sys.executable, folder)
    uv("pip", "install", "--quiet", *versions, "--compile-bytecode", "--python", python, *peer.packages)
    stamp.write_text(wanted)
    return python


def overlay(name: str, packages: Sequence[str], cache: Path) -> Path:
    """A folder with a few packages and none of their needs, to be put on PYTHONPATH beside the project's own."""
    folder = cache / "overlays" / name
    wanted = fingerprint(packages)
    stamp = folder / "installed"
    if not (stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        uv("pip", "install", "--quiet", "--no-deps", "--constraints", CONSTRAINTS, "--python-version", VERSION,
           "--target", folder, *packages)  # fmt: skip
        stamp.write_text(wanted)
    return folder


def peer_environment(threads: int, **more: str) -> dict[str, str]:
    """Environment variables for a process that is measured: its threads, and no look-ups on a hub."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    own = dict.fromkeys(names, str(threads)) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT), **more}


def uv(*arguments: str | Path) -> None:
    """Runs uv with pip's index settings. Raises ``EnvironmentMissingError``, or ``CalledProcessError`` if uv fails."""
    environment = index_settings()
    command = [*arguments]
    if command[0] == "pip" and environment.get("UV_OFFLINE") == "1" and "UV_FIND_LINKS" in environment:
        # What uv remembers of an index counts for nothing: the folders have all that is to be installed.
        command.insert(2, "--no-index")
    subprocess.run([_uv(), *command], check=True, env=environment)


def _uv() -> str:
    beside = ROOT / ".venv" / "bin" / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise EnvironmentMissingError("uv is neither in .venv nor on PATH; type `make install` first")
    return found


def _torch_backend() -> list[str]:
    """The peer gets the build of torch (CPU or CUDA) that the project's own environment has."""
    from importlib.metadata import version

    return ["--torch-backend", "cpu"] if version("torch").endswith("+cpu") else []


def fingerprint(packages: Sequence[str]) -> str:
    return hashlib.sha256(" ".join((VERSION, *packages)).encode() + CONSTRAINTS.read_bytes()).hexdigest()

"""The parts of the check: what each measures, what it needs, how long it may take. Standard library only."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.environments import PEERS, fingerprint

PEER = "trl-grpo-vllm"
LEARNER = ("torch", "transformers", "accelerate")
ENGINE = (*LEARNER, "vllm")
RUN = (*ENGINE, "ray")
INVARIANT = (8, 0)
"""For vLLM's batch-invariant mode, which `deterministic: true` asks for (by vLLM 0.32's page on it)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part, which runs in a process of its own."""

    name: str
    what: str
    seconds: int
    """What it may take; then it is killed and named. For a first check, in which models are written and programs
    compiled: about twice what an H200 took for those parts that ended there; for others it is a guess."""
    packages: tuple[str, ...]
    gpus: int = 1
    capability: tuple[int, int] = (0, 0)
    """The least that the card needs (NVIDIA's compute capability)."""
    on_cpu: bool = False
    """Whether ``--device cpu`` runs it unless told which parts to run."""


PARTS = (
    Part("attention", "flash attention, forward and backward, against float32", 60, LEARNER, on_cpu=True),
    Part("learner", "log-probs against float32, reference KL, MFU by stage, 0.5B and 1.5B", 150, LEARNER, on_cpu=True),
    Part("publication", "weights into an engine's process by gloo, beside a bare broadcast", 60, LEARNER, on_cpu=True),
    Part("publication-nccl", "the same by NCCL, from GPU to GPU", 60, LEARNER, gpus=2),
    Part("publication-ipc", "the same within a GPU by CUDA IPC, beside a bare copy", 40, LEARNER, on_cpu=True),
    Part("killed", "an engine killed inside a gloo broadcast", 40, LEARNER, on_cpu=True),
    Part("killed-nccl", "an engine killed inside an NCCL broadcast", 60, LEARNER, gpus=2),
    Part("agreement", "log-probs of engine and learner; sleep, wake, and the memory between", 150, ENGINE, on_cpu=True),
    Part("engine", "tokens/s of our engine beside bare vLLM", 180, ENGINE),
    Part("step-colocated", "GRPO steps, engine and learner on one GPU", 200, RUN),
    Part("step-separate", "GRPO steps, engine and learner on a GPU each", 200, RUN, gpus=2),
    Part("compile", "gradients, tokens/s and memory with trainer.compile beside without", 200, LEARNER, on_cpu=True),
    Part("memory", "an update's memory beside what rljob plan says, for five kinds of models", 200, LEARNER),
    Part("profile", "where the device's time goes in scoring and in an update", 90, LEARNER, on_cpu=True),
    Part("deterministic", "two learners with deterministic: true, bit by bit", 120, LEARNER, on_cpu=True),
    Part("engine-process", "tokens/s of our engine with vLLM's core in its own process", 150, ENGINE),
    Part("engine-process-weights", "weights, sleep and wake of such an engine", 150, ENGINE, on_cpu=True),
    Part("step-deterministic", "the steps of step-colocated with deterministic: true", 200, RUN, capability=INVARIANT),
    Part(
        "step-separate-deterministic",
        "the steps of step-separate with deterministic: true",
        200,
        RUN,
        gpus=2,
        capability=INVARIANT,
    ),
    Part("step-trl", "the steps of step-colocated by TRL with vLLM", 200, LEARNER),
)
BY_NAME = {part.name: part for part in PARTS}
RANKS = frozenset(part.name for part in PARTS if part.packages == LEARNER) - {"step-trl"} | {"engine-process-weights"}
"""Parts whose process does what a learner's rank does, and has the environment of one."""
DRIVER = 580
"""NVIDIA's lowest driver for CUDA 13, for which the project's torch and vLLM are built."""
_INSTALL = "`make install ACCELERATOR=gpu` makes .venv with everything"


class NothingToMeasureError(RuntimeError):
    """No part can be measured here; the message says why, and what to do."""


def no_gpu() -> str:
    """What to say once where no part finds a GPU."""
    if find_spec("torch") is None:
        return f"this Python has no torch: {_INSTALL} (benchmarks/gpu/README.md: without a network)"
    tries = "`--device cpu` of benchmarks.gpu tries the parts"
    cuda = cuda_of_torch(sys.executable)
    if cuda is None:
        return f"this Python's torch is a CPU build: {_INSTALL}; {tries}"
    return f"torch (CUDA {cuda}) sees no GPU: `nvidia-smi` has to list it, with driver {DRIVER} or newer; {tries}"


def lacking(part: Part, device: str, gpus: int, cache: Path, capability: tuple[int, int]) -> str | None:
    """Why ``part`` cannot be measured here, with the remedy where there is one; None: it can. ``capability``: of the
    machine's first GPU."""
    if absent := [name for name in part.packages if find_spec(name) is None]:
        return f"this Python has no {' and no '.join(absent)}: {_INSTALL} (benchmarks/gpu/README.md: without a network)"
    if device == "cpu":
        return None if part.on_cpu else "is measured on GPUs alone"
    if gpus < part.gpus:
        return f"needs {part.gpus} GPUs, and this machine has {gpus}"
    if capability < part.capability:
        needed, has = (".".join(map(str, version)) for version in (part.capability, capability))
        return f"needs compute capability {needed}, this card has {has}"
    if part.name == "step-trl" and not peer_is_made(cache):
        return "TRL with vLLM is not installed: `python3 -m benchmarks.gpu.peer` makes its environment"
    return None


def peer_is_made(cache: Path) -> bool:
    """Whether the environment of TRL with vLLM is there, as its versions ask for."""
    stamp = cache / "peers" / PEER / "installed"
    return stamp.exists() and stamp.read_text() == fingerprint(PEERS[PEER].packages)


def gpu_count(python: str) -> int:
    """GPUs that torch sees."""
    return int(_asked_of_torch(python, "torch.cuda.device_count()") or 0)


def capability_of(python: str) -> tuple[int, int]:
    """NVIDIA's compute capability of the first GPU; (0, 0) where there is none."""
    major, _, minor = _asked_of_torch(python, "'{}.{}'.format(*torch.cuda.get_device_capability())").partition(".")
    return (int(major), int(minor)) if minor else (0, 0)


def cuda_of_torch(python: str) -> str | None:
    """The version of CUDA that torch is built for; None: a build for CPUs."""
    return _asked_of_torch(python, "torch.version.cuda or ''") or None


def _asked_of_torch(python: str, expression: str) -> str:
    """In a process of its own: none of ours may keep memory of a device. Empty where torch cannot be imported."""
    program = f"import torch; print({expression})"
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    return asked.stdout.strip() if asked.returncode == 0 else ""

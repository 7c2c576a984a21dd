"""What each part needs, and what of it is missing here: found before anything is measured.

part      needs
engine    torch and vLLM
learner   torch and transformers
step      torch, vLLM and Ray, and an environment of TRL with vLLM, which is made from pip's index or find-links

Models are written here with random weights, and their prompts lie in the checkout: no part looks at a hub.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks.environments import EnvironmentMissingError, peer_python

Part = Literal["engine", "learner", "step"]
PARTS: tuple[Part, ...] = ("engine", "learner", "step")
ON_CPU: tuple[Part, ...] = ("engine", "learner")
PEER = "trl-grpo-vllm"
_PACKAGES: Mapping[Part, tuple[str, ...]] = {
    "engine": ("torch", "transformers", "vllm"),
    "learner": ("torch", "transformers"),
    "step": ("torch", "transformers", "vllm", "ray"),
}
_WITHOUT_AN_INDEX = (
    "Where no package index is in reach: `python -m benchmarks.gpu.wheels FOLDER` on a machine that has one, carry "
    "FOLDER over, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER for both commands"
)


def missing(part: Part, device: str, cache: Path) -> str | None:
    """What ``part`` lacks and how to bring it; None: it can run. The environment of TRL is made now if need be."""
    if absent := [name for name in _PACKAGES[part] if find_spec(name) is None]:
        return (
            f"this Python has no {' and no '.join(absent)}: `python3.11 requirements/install.py --accelerator gpu` "
            f"makes .venv with everything. {_WITHOUT_AN_INDEX}"
        )
    if device == "cuda" and (reason := _no_gpu()):
        return reason
    if part != "step":
        return None
    if device == "cpu":
        return "a step is compared with TRL's on a GPU alone"
    try:
        peer_python(PEER, cache)
    except (EnvironmentMissingError, OSError) as error:
        return f"the environment of TRL with vLLM cannot be made: {error}"
    except subprocess.CalledProcessError:
        return f"the environment of TRL with vLLM cannot be made (uv says above why). {_WITHOUT_AN_INDEX}"
    return None


def _no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return (
        f"torch {torch.__version__} sees no GPU: look at `nvidia-smi`, and whether torch is a CUDA build "
        "(`python3.11 requirements/install.py --accelerator gpu`); `--device cpu` tries the parts with a small model"
    )

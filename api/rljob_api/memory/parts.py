"""What a device holds at one moment, part by part, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MASTERS = "weights (float32)"
FROZEN = "frozen weights"
GATHERED = "gathered weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
CRITIC = "critic and its optimizer"
REFERENCE = "reference"
ACTIVATIONS = "activations"
WORKSPACE = "attention kernel's workspace"
LOGITS = "logits"
TRAVELLING = "gradients being summed"
MUON = "muon's matrices"
BUCKETS = "publication buckets"
ENGINE_WEIGHTS = "engine weights"
ENGINE_ADAPTER = "engine's adapter"
KV_CACHE = "KV cache"
ENGINE_WORK = "engine's activations"
GRAPHS = "CUDA graphs"
CONTEXT = "CUDA context"
LOADING = "model files being read"
OFFLOADED = "learner's state at rest"
ORDER = (
    FROZEN,
    MASTERS,
    OPTIMIZER,
    GRADIENTS,
    CRITIC,
    REFERENCE,
    GATHERED,
    ACTIVATIONS,
    WORKSPACE,
    LOGITS,
    TRAVELLING,
    MUON,
    BUCKETS,
    ENGINE_WEIGHTS,
    ENGINE_ADAPTER,
    KV_CACHE,
    ENGINE_WORK,
    GRAPHS,
    CONTEXT,
    LOADING,
    OFFLOADED,
)
"""In which parts are listed."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a step at which memory may be at its fullest."""

    name: str
    parts: Mapping[str, int]

    def __post_init__(self) -> None:
        # What is not there is not listed.
        kept = {part: size for part, size in self.parts.items() if size}
        object.__setattr__(self, "parts", MappingProxyType(kept))

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def beside(self, others: Mapping[str, int]) -> Moment:
        """This moment on a device that holds ``others`` too."""
        return Moment(self.name, {**self.parts, **{p: size + self.parts.get(p, 0) for p, size in others.items()}})


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """GPUs of one kind of process, or a pod's host memory, over a step."""

    name: str
    count: int
    """How many are alike."""
    capacity: int | None
    """Bytes; None: not known."""
    moments: tuple[Moment, ...]
    notes: tuple[str, ...] = field(default=())
    """What else is to be known of it."""
    on_gpus: bool = True
    """False: host memory."""
    short: int = 0
    """Bytes that something on it lacks of what it may take, whatever is free besides."""

    @property
    def peak(self) -> Moment:
        """The fullest moment."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def missing(self) -> int:
        """Bytes that do not fit; 0 where they do, or the capacity is not known."""
        return 0 if self.capacity is None else max(0, self.short, self.peak.total - self.capacity)

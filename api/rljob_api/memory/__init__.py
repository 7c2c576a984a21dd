"""Memory that a job needs, known before anything is rented: computed from the job and the model's shape alone.

shape.py         a model's parameters, from its ``config.json``; ``known.py``: well-known models by hub id
adapter.py       which layers have an adapter (model.lora), and how large it is
rows.py          the largest row that a rank computes at once
activations.py   what autograd keeps of it, and the output head
trainer.py       a trainer rank, moment by moment
engine.py        an engine's weights, KV cache and graphs
inputs.py        what of a job all this depends on
plan.py          GPU by GPU, and the one change that makes fit what does not
"""

from rljob_api.memory.accelerators import bytes_of
from rljob_api.memory.known import known_shape
from rljob_api.memory.parts import MemoryHolder, Moment
from rljob_api.memory.plan import JobChange, MemoryPlan, gib, plan_memory, untold
from rljob_api.memory.shape import ModelShape, UnknownShapeError

__all__ = [
    "JobChange",
    "MemoryHolder",
    "MemoryPlan",
    "ModelShape",
    "Moment",
    "UnknownShapeError",
    "bytes_of",
    "gib",
    "known_shape",
    "plan_memory",
    "untold",
]

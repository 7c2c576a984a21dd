"""The backends that are built in, and how one of them, or of anybody else's, is found by the name in a job.

``fsdp2`` lies in a folder here. Another backend is a class named ``module:Class`` in the job file, or an entry point of
the group ``rljob.backends``; a built-in one is registered by ``module:Class`` as well.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backend import Backend

BUILT_IN = {"fsdp2": "rljob_trainer.learner.backends.fsdp2:Fsdp2"}
GROUP = "rljob.backends"
"""Of entry points, as ``megatron = "their_package.module:TheirClass"``."""
FIELD = "spec.trainer.backend"


def registered() -> dict[str, str]:
    """``module:Class`` by name, the built-in ones first."""
    return BUILT_IN | {entry.name: entry.value for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def class_of(name: str) -> str:
    """``module:Class`` of a backend by its name. Raises ``JobFileError`` for a name that nobody has registered."""
    if ":" in name:
        return name
    known = registered()
    if name not in known:
        raise JobFileError(
            f"{FIELD}: there is no backend {name!r}; there are {', '.join(known)}, and any class as module:Class"
        )
    return known[name]


def backend_of(name: str, paths: Sequence[str] = ()) -> Backend:
    """The backend of a name. ``paths``: folders in which a ``module:Class`` is looked for before the interpreter's own.

    Raises ``JobFileError`` when it cannot be found or imported, or is no backend.
    """
    module, _, kind = class_of(name).partition(":")
    if ":" in name:
        sys.path[:0] = [path for path in paths if path not in sys.path]
    try:
        found = vars(importlib.import_module(module))[kind]()
    except Exception as problem:  # a module of others may raise anything when it is imported
        raise JobFileError(
            f"{FIELD}: {name} cannot be made ({type(problem).__name__}: {problem}); its module must lie beside the job "
            "file or be installed, also where the ranks run"
        ) from problem
    lacking = [method for method in ("placement", "rules", "has_live_model", "start") if not hasattr(found, method)]
    if lacking:
        raise JobFileError(f"{FIELD}: {name} is no backend, it has no {', '.join(lacking)} (learner/backend.py)")
    backend: Backend = found
    return backend

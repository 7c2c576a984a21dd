"""The backends that are built in, and how one of them, or of anybody else's, is found by the name in a job.

``fsdp2`` lies in a folder here. Another backend is a class named ``module:Class`` in the job file. The names that are
built in are those that ``rljob_api.spec.pools.BackendName`` admits, so that no pod is made for another one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backend import Backend

BUILT_IN = {"fsdp2": "rljob_trainer.learner.backends.fsdp2:Fsdp2"}
FIELD = "spec.trainer.backend"


def backend_of(name: str, paths: Sequence[str] = ()) -> Backend:
    """The backend of a name. ``paths``: folders in which a ``module:Class`` is looked for before the interpreter's own.

    Raises ``JobFileError`` when it cannot be found or imported, or is no backend.
    """
    module, _, kind = BUILT_IN.get(name, name).partition(":")
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

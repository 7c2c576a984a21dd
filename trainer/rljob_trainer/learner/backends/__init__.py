"""The backends that are built in, and how one of them, or of anybody else's, is found by the name in a job.

``fsdp2`` lies in a folder here. Another backend is a class named ``module:Class`` in the job file. The names that are
built in are those that ``rljob_api.spec.pools.BackendName`` admits, so that no pod is made for another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backend import Backend
from rljob_trainer.user_code import imported

BUILT_IN = {"fsdp2": "rljob_trainer.learner.backends.fsdp2:Fsdp2"}
FIELD = "spec.trainer.backend"


def backend_of(name: str, paths: Sequence[str] = ()) -> Backend:
    """The backend of a name. ``paths``: folders in which a ``module:Class`` is looked for before the interpreter's own.

    Raises ``JobFileError`` when it cannot be found or imported, or is no backend.
    """
    kind = imported(BUILT_IN.get(name, name), FIELD, paths if ":" in name else ())
    try:
        found = kind()
    except Exception as problem:  # a class of others may raise anything when it is made
        raise JobFileError(f"{FIELD}: cannot create {name} ({type(problem).__name__}: {problem})") from problem
    lacking = [method for method in ("placement", "rules", "has_live_model", "start") if not hasattr(found, method)]
    if lacking:
        raise JobFileError(f"{FIELD}: {name} is not a backend, it has no {', '.join(lacking)} (learner/backend.py)")
    backend: Backend = found
    return backend

"""Objects that a job names as ``module:name``, from modules beside its file or installed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from rljob_trainer.errors import JobFileError


def imported(name: str, field: str, paths: Sequence[str | os.PathLike[str]] = ()) -> Any:
    """The object ``module:name``. ``paths``: folders in which its module is looked for before the interpreter's own;
    ``field`` is where the job names it.

    Raises ``JobFileError`` when it cannot be had.
    """
    module, _, attribute = name.partition(":")
    folders = [str(os.fspath(path)) for path in paths]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        found = vars(importlib.import_module(module))
    except (Exception, SystemExit) as problem:  # a module of others may raise anything, or be a script that ends
        raise JobFileError(
            f"{field}: cannot import {name} ({type(problem).__name__}: {problem}); put its module beside the job "
            "file, or install it wherever it is used"
        ) from problem
    if attribute not in found:
        raise JobFileError(f"{field}: cannot find {name}: the module {module} has no {attribute}")
    return found[attribute]

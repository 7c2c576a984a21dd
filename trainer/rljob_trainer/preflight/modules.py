"""Modules of the user that a job names: found without being run."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob_api import Violation


def search_path(folders: Sequence[Path]) -> list[str]:
    """Where modules are looked for: the folders first, then where the interpreter does."""
    return list(dict.fromkeys([*map(str, folders), *(entry for entry in sys.path if entry)]))


def module_spec(path: str, module: str, search: Sequence[str]) -> importlib.machinery.ModuleSpec | Violation:
    """Where a module (dots allowed) is, or what is wrong with the field ``path`` that names it."""
    places: Sequence[str] | None = search
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        parents = ".".join(module.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(parents if depth else part, places) if places else None
        if spec is None:
            return Violation(
                path,
                f"there is no module {parents}",
                "put it beside the job file or into the current folder, install it, or (on a cluster) mount it by code",
            )
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
    assert spec is not None
    return spec

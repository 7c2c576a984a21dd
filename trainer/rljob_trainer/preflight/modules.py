"""Modules of the user that a job names: found without being run."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Violation
from rljob_api.problems import function_of_file


def search_path(folders: Sequence[Path]) -> list[str]:
    """Where modules are looked for: the folders first, then where the interpreter does."""
    return list(dict.fromkeys([*map(str, folders), *(entry for entry in sys.path if entry)]))


def module_spec(path: str, target: str, search: Sequence[str]) -> importlib.machinery.ModuleSpec | Violation:
    """Where the module of ``module:name`` (dots allowed) is, or what is wrong with the field ``path`` that names it."""
    module = target.partition(":")[0]
    places: Sequence[str] | None = search
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        parents = ".".join(module.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(parents if depth else part, places) if places else None
        if spec is None:
            remedy = "put it beside the job file or into the current folder, install it, or mount it (spec.code)"
            return Violation(path, f"there is no module {parents}", function_of_file(target) or remedy)
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
    assert spec is not None
    return spec


def parsed(path: str, file: Path) -> ast.Module | Violation:
    """A Python file, read without being run, or what is wrong with the field ``path`` that leads to it."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as problem:
        return Violation(path, f"{file} cannot be read ({problem.strerror})", "check its permissions")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        line = getattr(problem, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        reason = getattr(problem, "msg", None) or str(problem) or "nested too deep"
        return Violation(path, f"{where} is not valid Python ({reason})", "fix it")


def names_in(tree: ast.Module) -> set[str]:
    """The names that a file may give a meaning."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing_imports(path: str, file: Path, module: str, search: Sequence[str]) -> Iterator[Violation]:
    """The imports of ``file`` that find nothing, without running it. Only those that are made whenever the module is:
    what stands in ``try``, ``if``, ``with`` or a function may be meant to fail. Looked for is the first part
    of a name: a package may say of itself, when it runs, where its parts are.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # has been said
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            wanted = [node.module]
        else:
            continue
        for name in wanted:
            first = name.partition(".")[0]
            if first == module.partition(".")[0] or _is_there(first, search):
                continue
            folders = ", ".join(entry for entry in search if not entry.endswith((".zip", "lib-dynload")))
            yield Violation(
                path,
                f"{file}, line {node.lineno} imports {name}, but there is no module {first} in {folders}",
                f"install {first}, put it beside the job file, or correct the import",
            )


def _is_there(name: str, search: Sequence[str]) -> bool:
    """Whether a top-level module of that name is built in, loaded, or found by one of Python's finders."""
    if name in sys.builtin_module_names or name in sys.modules:
        return True
    if importlib.machinery.PathFinder.find_spec(name, list(search)) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

"""The program and the tools of a job's environment: found and read without being run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_api.problems import did_you_mean
from rljob_trainer.preflight.modules import missing_imports, module_spec, names_in, parsed, search_path


def check_environment(found: Readable, folders: Sequence[Path]) -> Iterator[Violation]:
    """``folders``: in which modules are looked for besides the interpreter's own."""
    if found.job.spec.code or not found.says("spec.code"):
        return  # with code, the modules are somewhere else
    environment = found.job.spec.rollout.environment
    named = [("spec.rollout.environment.function", environment.function)]
    named += [(f"spec.rollout.environment.tools[{i}].function", t.function) for i, t in enumerate(environment.tools)]
    for path, name in named:
        if name is not None:
            yield from _check(path, name, search_path(folders))


def _check(path: str, function: str, search: Sequence[str]) -> Iterator[Violation]:
    module, _, name = function.partition(":")
    spec = module_spec(path, module, search)
    if isinstance(spec, Violation):
        yield spec
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    file = Path(spec.origin)
    tree = parsed(path, file)
    if isinstance(tree, Violation):
        yield tree
        return
    names = names_in(tree)
    if name not in names and "*" not in names and "__getattr__" not in names:
        close = did_you_mean(name, names)
        yield Violation(path, f"{file} has no {name}", f"did you mean {close}?" if close else "define it there")
    yield from missing_imports(path, file, module, search)

"""The program and the tools of a job's environment: found and read without being run. Passages of corpora."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_api.problems import did_you_mean
from rljob_trainer.errors import DataError, JobFileError
from rljob_trainer.preflight.data import readable_here
from rljob_trainer.preflight.modules import missing_imports, module_spec, names_in, parsed, search_path
from rljob_trainer.preflight.places import HUB, as_violation, unknown_scheme


def check_environment(found: Readable, folders: Sequence[Path], base: Path) -> Iterator[Violation]:
    """``folders``: in which modules are looked for besides the interpreter's own; ``base``: where relative paths
    start."""
    yield from _corpora(found, base)
    if found.job.spec.code or not found.says("spec.code"):
        return  # with code, the modules are somewhere else
    environment = found.job.spec.rollout.environment
    named = [("spec.rollout.environment.function", environment.function)]
    named += [(f"spec.rollout.environment.tools[{i}].function", t.function) for i, t in enumerate(environment.tools)]
    for path, name in named:
        if name is not None:
            yield from _check(path, name, search_path(folders))


def _corpora(found: Readable, base: Path) -> Iterator[Violation]:
    """What is wrong with passages that lie on this machine, as far as it shows when a file is opened."""
    for index, tool in enumerate(found.job.spec.rollout.environment.tools):
        path = f"spec.rollout.environment.tools[{index}].corpus"
        if tool.type != "search" or tool.corpus is None or not found.says(path):
            continue
        yield from unknown_scheme(f"{path}.source", tool.corpus.source, HUB)
        if not readable_here(tool.corpus.source, base):
            continue
        from rljob_trainer.environments.search.corpus import Corpus

        try:
            Corpus(tool.corpus, path, base).check()
        except (DataError, JobFileError) as error:
            at = next((at for at in (f"{path}.passages", f"{path}.source") if str(error).startswith(f"{at}: ")), None)
            yield as_violation(error, at or f"{path}.source")


def _check(path: str, function: str, search: Sequence[str]) -> Iterator[Violation]:
    module, _, name = function.partition(":")
    spec = module_spec(path, function, search)
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

"""What can be known before a run starts by looking at the files that a job names: data, model, rewards, checkpoints.

Neither torch nor the network is touched: remote addresses are left to the run itself, and so are hub ids of models that
are not in this machine's cache. The schema and the rules between fields are ``rljob_api``'s. A job that is not valid by
those is looked at as far as it can be read, so that everything is said at once.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import Readable, RLJob, Violation
from rljob_api.problems import did_you_mean
from rljob_api.spec.data import TrainPart, ValidationSet
from rljob_trainer.errors import DataError, JobFileError, RLJobError

if TYPE_CHECKING:
    from rljob_trainer.data.feed import Rows
    from rljob_trainer.models.folder import Shape


def preflight(found: Readable, *, base: Path | None = None, code: Sequence[Path] = ()) -> list[Violation]:
    """Everything wrong with the files of a job, but for what follows from values that can't be read.

    ``base`` is where relative paths start (default: the current folder); ``code`` are folders, besides the current one
    and the interpreter's own, in which modules of custom rewards may lie.
    """
    base, job = base or Path.cwd(), found.job
    violations = [
        *_model(found, base),
        *_data(found, base),
        *_rewards(found, [*code, Path.cwd()]),
        *_checkpoint(job, base),
        *_restore(job, base),
    ]
    return [violation for violation in violations if found.says(violation.path)]


def _split(error: RLJobError, path: str) -> Violation:
    """An error's message, which says what and what to do, as a violation at ``path``."""
    text = str(error).removeprefix(f"{path}: ")
    problem, separator, remedy = text.rpartition("; ")
    return Violation(path, problem, remedy) if separator else Violation(path, text, "see there")


def _local(location: str, base: Path) -> Path | None:
    """The path of a location on this machine; None for an address elsewhere."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return None if "://" in location else base / Path(location).expanduser()


def _model(found: Readable, base: Path) -> Iterator[Violation]:
    model = found.job.spec.model
    if model.random is not None:
        tokenizer = model.random.tokenizer.source
        yield from _tokenizer("spec.model.random.tokenizer.source", tokenizer, base)
        return
    yield from _tokenizer("spec.model.tokenizer", model.tokenizer, base)
    path = "spec.model.source"
    source = model.source
    if not source or not found.says(path):
        return
    if source.startswith("hf://"):
        yield from _model_of_the_hub(found, source.removeprefix("hf://"))
        return
    folder = _local(source, base)
    if folder is None:
        return
    if not folder.is_dir():
        if _may_be_hub_id(source):
            yield from _model_of_the_hub(found, source)
        else:
            yield Violation(path, f"there is no folder {folder}", "write a model folder or a hub id (owner/name)")
        return
    from rljob_trainer.models.folder import read_folder

    try:
        facts = read_folder(folder, tokenizer=model.tokenizer is None or not found.says("spec.model.tokenizer"))
    except JobFileError as error:
        yield _split(error, path)
        return
    yield from _shape(found, facts)


def _model_of_the_hub(found: Readable, name: str) -> Iterator[Violation]:
    """A model that an earlier run or download has left in this machine's cache; of others the run itself finds out."""
    from rljob_trainer.models.folder import read_shape
    from rljob_trainer.models.hub_cache import cached_file

    config = cached_file(name, "config.json", found.job.spec.model.revision)
    if config is None or not found.says("spec.model.revision"):
        return
    try:
        yield from _shape(found, read_shape(config))
    except JobFileError as error:
        yield _split(error, "spec.model.source")


def _shape(found: Readable, shape: Shape) -> Iterator[Violation]:
    yield from _context(found, shape.context_length)
    engine = found.job.spec.rollout.engine if found.says("spec.rollout.engine") else None
    if engine == "torch" and shape.unsupported is not None:
        yield Violation(
            "spec.rollout.engine", f"the torch engine {shape.unsupported}", "use rollout.engine: vllm, or another model"
        )
    if engine == "vllm" and shape.head_dim < 32:
        yield Violation(
            "spec.model.source",
            f"its heads are {shape.head_dim} wide, and vLLM needs 32 or more",
            "use rollout.engine: torch",
        )


def _tokenizer(path: str, source: str | None, base: Path) -> Iterator[Violation]:
    folder = _local(source, base) if source else None
    if source and folder is not None and not folder.is_dir() and not _may_be_hub_id(source):
        yield Violation(
            path, f"there is no folder {folder}", "write a folder with a tokenizer or a hub id (owner/name)"
        )


def _may_be_hub_id(source: str) -> bool:
    return source.count("/") <= 1 and not source.startswith((".", "/", "~"))


def _context(found: Readable, context: int) -> Iterator[Violation]:
    """Prompt and response must fit the model; so must the responses of validation."""
    job = found.job
    if not found.says("spec.data.maxPromptTokens"):
        return
    prompt, response = job.spec.data.max_prompt_tokens, job.spec.rollout.max_response_tokens
    lengths = [("spec.rollout.maxResponseTokens", response)]
    for index, part in enumerate(job.spec.data.validation):
        if part.sampling.max_response_tokens is not None:
            path = f"spec.data.validation[{index}].sampling.maxResponseTokens"
            lengths.append((path, part.sampling.max_response_tokens))
    for path, length in lengths:
        if prompt + length > context:
            remedy = f"lower it to {context - prompt}" if prompt < context else "lower data.maxPromptTokens"
            yield Violation(
                path,
                f"{length} and data.maxPromptTokens = {prompt} together exceed the model's context of {context}",
                remedy,
            )


def _data(found: Readable, base: Path) -> Iterator[Violation]:
    data = found.job.spec.data
    parts: list[tuple[str, TrainPart | ValidationSet]] = []
    for index, train in enumerate(data.train.sources):
        parts.append((f"spec.data.train.parts[{index}]" if data.train.parts else "spec.data.train", train))
    parts += [(f"spec.data.validation[{index}]", held_out) for index, held_out in enumerate(data.validation)]
    for path, part in parts:
        if found.says(f"{path}.task" if part.task else f"{path}.source", f"{path}.split"):
            yield from _source(found, path, part, base)


def _source(found: Readable, path: str, part: TrainPart | ValidationSet, base: Path) -> Iterator[Violation]:
    """One set of rows: it must be readable, and its rows must have what prompt and answer name.

    Looked at are the rows that ``open_rows`` reads: all, but of large files only the first thousands and the last.
    """
    from rljob_trainer.data.columns import column, lacks_column, null_column

    data = found.job.spec.data
    rows: Rows | None = None
    field = f"{path}.task.size" if part.task else f"{path}.source"
    try:
        if part.task is not None:
            from rljob_trainer.data.tasks import generate

            task, split = part.task, "train" if isinstance(part, TrainPart) else "validation"
            generate(task.type, split=split, digits=task.digits, size=task.size or 1, seed=task.seed)  # type: ignore[arg-type]
            present: tuple[str, ...] = ("question", "answer")
            row = dict.fromkeys(present, "")
        else:
            if part.source is None or not _readable_here(part.source, base):
                return
            from rljob_trainer.data.sources import open_rows

            rows = open_rows(part.source, split=part.split, limit=part.limit, base=base, field=field)
            present, row = rows.columns, dict(rows[0])
    except (DataError, JobFileError) as error:
        yield _split(error, field)
        return
    wanted = [("spec.data.prompt", name) for name in _columns(data.prompt)]
    if data.answer is not None:
        wanted.append(("spec.data.answer", data.answer))
    for place, name in wanted:
        if not found.says(place):
            continue
        try:
            column(row, name)
        except KeyError:
            close = did_you_mean(name, present)
            where = f"task {part.task.type}" if part.task else str(part.source)
            yield Violation(
                place,
                f'{where} has no column "{name}"; it has {", ".join(present)}',
                f"did you mean {close}?" if close else "name one of them",
            )
            continue
        if rows is None or not found.says(f"{path}.limit"):
            continue
        if (index := rows.first_without(name)) is not None:
            yield _split(lacks_column(rows.place(index), rows[index], name, place), field)
        elif place == "spec.data.prompt" and (index := rows.first_null(name)) is not None:
            yield _split(null_column(rows.place(index), name, place), field)


def _readable_here(source: str, base: Path) -> bool:
    """Whether a source is, or claims to be, a file of this machine (and not a data set of the hub)."""
    source = source.removeprefix("file://")
    if "://" in source:
        return False
    path = base / Path(source).expanduser()
    claims = path.suffix in (".jsonl", ".ndjson", ".json", ".parquet") or source.startswith((".", "/", "~"))
    return claims or path.exists() or any(sign in source for sign in "*?[")


def _columns(prompt: str) -> list[str]:
    """The columns that ``data.prompt`` names: itself, or the places of the template."""
    from rljob_trainer.data.columns import Template, is_template

    try:
        return list(Template(prompt, "spec.data.prompt").columns) if is_template(prompt) else [prompt]
    except JobFileError:  # a rule has said it
        return []


def _rewards(found: Readable, folders: Sequence[Path]) -> Iterator[Violation]:
    job = found.job
    for index, function in enumerate(job.spec.reward.functions):
        place = f"spec.reward.functions[{index}]"
        if function.type == "custom":
            if function.function is not None and not job.spec.code and found.says("spec.code"):
                yield from _custom_function(f"{place}.function", function.function, folders)
        elif function.params:
            from rljob_trainer.rewards.terms import Term, TermSpec

            params = dict(function.params)
            if function.pattern is not None:
                params["pattern"] = function.pattern
            try:
                Term(TermSpec(name=function.name or function.type, type=function.type, place=place, params=params))
            except JobFileError as error:
                yield _split(error, str(error).partition(": ")[0])


def _custom_function(path: str, target: str, folders: Sequence[Path]) -> Iterator[Violation]:
    """Looks for ``module:function`` without running the module."""
    module, _, name = target.partition(":")
    search = list(dict.fromkeys([*map(str, folders), *(entry for entry in sys.path if entry)]))
    places: Sequence[str] | None = search
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        parents = ".".join(module.split(".")[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(parents if depth else part, places) if places else None
        if spec is None:
            yield Violation(
                path,
                f"there is no module {parents}",
                "put it beside the job file or into the current folder, install it, or (on a cluster) mount it by code",
            )
            return
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    yield from _function_in(path, Path(spec.origin), name)


def _function_in(path: str, file: Path, name: str) -> Iterator[Violation]:
    """Whether a Python file defines a name at its top level, as far as reading can tell."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        yield Violation(path, f"{where} is not valid Python ({getattr(problem, 'msg', problem)})", "mend it")
        return
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if name in names or "*" in names or "__getattr__" in names:
        return
    close = did_you_mean(name, names)
    yield Violation(path, f"{file} has no function {name}", f"did you mean {close}?" if close else "define it there")


def _checkpoint(job: RLJob, base: Path) -> Iterator[Violation]:
    uri = job.spec.checkpoint.uri
    folder = _local(uri, base) if uri else None
    if folder is None:
        return
    path = "spec.checkpoint.uri"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield Violation(path, f"{existing} is a file, not a folder", "choose another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Violation(path, f"{existing} cannot be written", "choose another folder, or change its permissions")


def _restore(job: RLJob, base: Path) -> Iterator[Violation]:
    folder = _local(job.spec.restore.from_, base) if job.spec.restore else None
    if folder is not None and not folder.is_dir():
        yield Violation("spec.restore.from", f"there is no folder {folder}", "write the folder of a checkpoint or job")

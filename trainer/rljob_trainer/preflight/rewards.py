"""The custom reward functions of a job, found and read without being run. What built-in ones take, the API knows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rljob_api import Readable, Violation
from rljob_api.problems import did_you_mean
from rljob_api.spec.reward import RewardFunction
from rljob_trainer.preflight.modules import missing_imports, module_spec, names_in, parsed, search_path
from rljob_trainer.rewards.json_schema import schema_validator
from rljob_trainer.rewards.signatures import NAMES, Parameters, SignatureError, convention_of, has


def check_rewards(
    found: Readable, folders: Sequence[Path], columns: Mapping[str, Collection[str]]
) -> Iterator[Violation]:
    """``columns``: of each data source that could be looked at, by its name."""
    job = found.job
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "jsonSchema" and isinstance(function.params.get("schema"), dict):
            try:
                schema_validator(function.params["schema"])
            except ValueError as error:
                yield Violation(f"spec.reward.functions[{index}].params.schema", str(error), "correct the schema")
        if function.type != "custom" or function.function is None:
            continue
        if not job.spec.code and found.says("spec.code"):
            place = f"spec.reward.functions[{index}]"
            present = columns if found.says("spec.data") else {}
            yield from _custom_function(place, function, folders, present, _has_answers(found))


def _has_answers(found: Readable) -> bool:
    """Whether there may be reference answers, as far as the job can be read. Generated tasks have them."""
    data = found.job.spec.data
    parts = data.train.sources
    named = data.answer is not None or all(part.task is not None or part.answer is not None for part in parts)
    return named or not found.says("spec.data")


def _custom_function(
    place: str,
    function: RewardFunction,
    folders: Sequence[Path],
    columns: Mapping[str, Collection[str]],
    has_answers: bool,
) -> Iterator[Violation]:
    """Looks for ``module:function`` without running the module."""
    path = f"{place}.function"
    module, _, name = str(function.function).partition(":")
    search = search_path(folders)
    spec = module_spec(path, str(function.function), search)
    if isinstance(spec, Violation):
        yield spec
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    yield from _function_in(place, Path(spec.origin), name, function, columns, has_answers)
    yield from missing_imports(path, Path(spec.origin), module, search)


def _function_in(
    place: str,
    file: Path,
    name: str,
    function: RewardFunction,
    columns: Mapping[str, Collection[str]],
    has_answers: bool,
) -> Iterator[Violation]:
    """Whether a Python file defines a name at its top level that can be called with what a sample has, as far as
    reading can tell."""
    path = f"{place}.function"
    tree = parsed(path, file)
    if isinstance(tree, Violation):
        yield tree
        return
    names = names_in(tree)
    if name in names or "*" in names or "__getattr__" in names:
        if (definition := _only_definition(tree, name)) is not None:
            yield from _call(place, f"{file}, line {definition.lineno}", definition, function, columns, has_answers)
        elif (value := _only_value(tree, name)) is not None:
            yield Violation(
                path,
                f"{name} in {file}, line {value.lineno} is not a function",
                "use a function that takes a sample's columns",
            )
        return
    close = did_you_mean(name, names)
    yield Violation(path, f"{file} has no function {name}", f"did you mean {close}?" if close else "define it there")


def _only_definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of that name, where the file says at one place, and without a decorator, what it is."""
    bound = _bindings(tree, name)
    if len(bound) != 1 or bound[0] not in tree.body:
        return None
    found = bound[0]
    plain = isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list
    return found if plain and isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _only_value(tree: ast.Module, name: str) -> ast.expr | None:
    """What cannot be called and is all that the file says of that name: a number, a text, a list."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]
    ]
    if len(values) != 1 or len(_bindings(tree, name)) != 1:
        return None
    plain = isinstance(values[0], ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.Set | ast.Dict)
    return values[0] if plain else None


def _bindings(tree: ast.Module, name: str) -> list[ast.AST]:
    """All places of a file that give a name a meaning."""
    return [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
    ]


def _call(
    place: str,
    where: str,
    definition: ast.FunctionDef | ast.AsyncFunctionDef,
    function: RewardFunction,
    columns: Mapping[str, Collection[str]],
    has_answers: bool,
) -> Iterator[Violation]:
    """What keeps a function from being called by keyword with what each of its sources' samples has."""
    arguments, name = definition.args, definition.name
    by_keyword = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = {argument.arg for argument in positional[len(positional) - len(arguments.defaults) :]}
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional |= {argument.arg for argument, default in defaults if default is not None}
    for argument in arguments.posonlyargs:
        if argument.arg not in optional:
            yield Violation(
                f"{place}.function",
                f"{where}: {name} takes {argument.arg} only by position, but arguments are passed by name",
                "remove the / from its parameters",
            )
    if arguments.kwarg is None:
        for given in function.params:
            if given not in by_keyword:
                close = did_you_mean(given, by_keyword)
                yield Violation(
                    f"{place}.params",
                    f"{where}: {name} has no parameter {given!r}",
                    f"did you mean {close}?" if close else f"its parameters are {', '.join(by_keyword) or 'none'}",
                )
    parameters = Parameters(tuple(by_keyword), frozenset(optional))
    try:
        convention = convention_of(parameters, function.params)
    except SignatureError as error:
        yield Violation(f"{place}.function", f"{where}: {name} {error.problem}", error.remedy)
        return
    if convention == "verl" and "ground_truth" in parameters.required and not has_answers:
        yield Violation(
            f"{place}.function",
            f"{where}: {name} needs ground_truth, but the job sets no reference answer",
            "set spec.data.answer to its column (reward_model.ground_truth in data sets made for verl)",
        )
    needed = [n for n in parameters.required if n not in function.params]
    # verl's are the same for all rows.
    for source, present in columns.items() if convention != "verl" else [("", ())]:
        if function.sources and source and source not in function.sources:
            continue
        there = has(convention, present)
        for wanted in needed:
            if wanted not in there:
                close = did_you_mean(wanted, there)
                whose = f"samples of the source {source!r} don't have" if source else "no sample has"
                way = "" if convention == "rljob" else f" in {NAMES[convention]} signature"
                yield Violation(
                    f"{place}.function",
                    f"{where}: {name} needs {wanted!r}, which {whose}{way}; they have {', '.join(there)}",
                    f"did you mean {close}?" if close else "give it a default, set it in params, or add the column",
                )
        if any(wanted not in there for wanted in needed):
            return

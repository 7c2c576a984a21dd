"""The tools that a job names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.environments.search.kept import opened_search
from rljob_trainer.environments.tools import PythonPrograms, Tool, calculator
from rljob_trainer.errors import JobFileError
from rljob_trainer.user_code import imported
from rljob_trainer.world.sandbox import Sandbox

if TYPE_CHECKING:
    from rljob_api.spec.environment import ToolSpec

_SEARCHES = 2
"""Calls of a search at once, each in a thread: all compute, and each holds a number for every passage."""


def tool_of(
    given: ToolSpec, field: str, base: Path, sandbox: Sandbox | None, report: Callable[[str], None] = lambda _: None
) -> Tool:
    """The tool that a job names; may take long, and then ``report`` is told of it. ``base``: where the user's modules
    lie. Raises ``JobFileError``, and ``DataError`` for a corpus."""
    if given.type == "calculator":
        return Tool(given.label, calculator, given.description, field)
    if given.type == "python":
        assert sandbox is not None
        told = f"Runs a Python program and returns what it prints. {sandbox.told}".rstrip()
        return Tool(given.label, PythonPrograms(sandbox).run, given.description or told, field, own_limit=True)
    if given.type == "search":
        assert given.corpus is not None
        search = opened_search(given.corpus, f"{field}.corpus", base, report)
        return Tool(
            given.label,
            search.search,
            given.description,
            field,
            concurrency=_SEARCHES,
            corpus=search.digest,
            settings={"passages": search.digest, **given.corpus.model_dump(mode="json", exclude={"source", "split"})},
        )
    assert given.function is not None
    function = imported(given.function, f"{field}.function", [base])
    if not callable(function):
        raise JobFileError(f"{field}.function: {given.function} is not a function")
    return Tool(given.label, function, given.description, f"{field}.function", concurrency=given.concurrency)

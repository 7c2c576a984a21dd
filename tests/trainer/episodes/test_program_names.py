"""By what a program is known from one process to the next."""

from __future__ import annotations

import functools
from typing import Any

from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.programs import named


def program_of() -> None:
    """A program."""


def test_a_program_that_is_an_object_is_known_by_the_text_of_its_class() -> None:
    class One:
        async def __call__(self, task: Task, model: Voice, world: Any) -> None:
            await model.ask([1])

    class Two:
        async def __call__(self, task: Task, model: Voice, world: Any) -> None:
            await model.ask([2])

    digests = {named(program).split()[-1] for program in (One(), Two())}
    assert len(digests) == 2
    assert named(One()) == named(One())
    assert "00000000" not in digests


def test_a_program_is_known_by_the_tools_and_params_that_it_uses_too() -> None:
    def search(query: str) -> str:
        return "a"

    def searched_otherwise(query: str) -> str:
        return "b"

    class Index:
        def __call__(self, query: str) -> str:
            return "c"

    used: list[list[Any]] = [[], [search], [searched_otherwise], [Index()], [{"k": 3}], [{"k": 4}], [search, search]]
    assert len({named(program_of, uses) for uses in used}) == len(used)
    assert named(program_of, [functools.partial(search)]) == named(program_of, [search])

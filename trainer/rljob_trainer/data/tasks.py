"""Generated tasks: problems that need no data set, for quick starts, tests and checks of a new machine.

A task is one function from a problem's number to its text and answer; the decorator says how many problems there
are. Everything else is shared: which problems are held out, and which of them a seed draws in which order.

A problem is held out by a fixed hash of its number, whatever the seed and the size, so training and validation
sets are disjoint even when they were asked for with different seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from rljob_trainer.data.order import permutation, raw_stream
from rljob_trainer.errors import JobFileError

TaskSplit = Literal["train", "validation"]

HELD_OUT_ONE_IN = 10
_LISTED = 1 << 22
"""Up to this many problems are listed and permuted; beyond it they are drawn and repeats are skipped."""


class Problem(NamedTuple):
    """What the model reads and what it should write."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class GeneratedTask:
    """A family of problems, numbered ``0 .. count(digits) - 1``."""

    name: str
    count: Callable[[int], int]
    problem: Callable[[int, int], Problem]
    """``(number, digits)`` to problem; different numbers give different prompts."""


TASKS: dict[str, GeneratedTask] = {}


def task(
    name: str, count: Callable[[int], int]
) -> Callable[[Callable[[int, int], Problem]], Callable[[int, int], Problem]]:
    """Registers a generated task under the name that ``data.train.task.type`` uses."""

    def register(problem: Callable[[int, int], Problem]) -> Callable[[int, int], Problem]:
        TASKS[name] = GeneratedTask(name, count, problem)
        return problem

    return register


def _smallest(digits: int) -> int:
    return 0 if digits == 1 else int(10 ** (digits - 1))


def _span(digits: int) -> int:
    """How many numbers have exactly so many digits (one digit: 0 to 9)."""
    return int(10**digits) - _smallest(digits)


@task("addition", count=lambda digits: _span(digits) ** 2)
def addition(number: int, digits: int) -> Problem:
    """``12+34=`` -> ``046``: two numbers of exactly ``digits`` digits; the sum has one more, so that places line up."""
    left, right = divmod(number, _span(digits))
    left, right = left + _smallest(digits), right + _smallest(digits)
    return Problem(f"{left}+{right}=", f"{left + right:0{digits + 1}d}")


@task("copy", count=lambda digits: int(10**digits))
def copy(number: int, digits: int) -> Problem:
    """``907=`` -> ``907``: a string of ``digits`` digits, leading zeros included."""
    text = f"{number:0{digits}d}"
    return Problem(f"{text}=", text)


@task("parity", count=lambda digits: 2**digits)
def parity(number: int, digits: int) -> Problem:
    """``01101=`` -> ``1``: whether a string of ``digits`` bits has an odd number of ones. Gradient descent hardly finds
    the answer of many bits; a tool that counts tells it."""
    return Problem(f"{number:0{digits}b}=", str(number.bit_count() % 2))


def is_held_out(number: int) -> bool:
    """Whether the problem belongs to validation (one in ten does). A splitmix64 round over the number."""
    mask = (1 << 64) - 1
    mixed = (number + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) % HELD_OUT_ONE_IN == 0


def generate(name: str, *, split: TaskSplit, digits: int, size: int | None, seed: int) -> list[Problem]:
    """``size`` different problems of one split (None: all); which ones and their order is the seed's.

    Raises ``JobFileError`` for an unknown task, and for a size beyond the number of problems there are.
    """
    if name not in TASKS:
        raise JobFileError(f"there is no generated task {name!r}; use one of {', '.join(sorted(TASKS))}")
    chosen = TASKS[name]
    count = chosen.count(digits)
    if size is None and count > _LISTED:
        raise JobFileError(
            f"task {name!r} with {digits} digits has {count:,} problems, too many to use all of them; set its size"
        )
    held_out = split == "validation"
    numbers = (number for number in _visit(count, seed) if is_held_out(number) == held_out)
    drawn = list(islice(numbers, size))
    if not drawn or (size is not None and len(drawn) < size):
        raise JobFileError(
            f"task {name!r} with {digits} digits has {len(drawn):,} different {split} problems"
            + (f", fewer than its size = {size:,}; lower size or raise digits" if drawn else "; raise its digits")
        )
    return [chosen.problem(number, digits) for number in drawn]


def _visit(count: int, seed: int) -> Iterator[int]:
    """Every problem once, in the seed's order."""
    if count <= _LISTED:
        yield from permutation(count, seed).tolist()
        return
    seen: set[int] = set()
    for number in _draws(count, seed):
        if number not in seen:
            seen.add(number)
            yield number
        if len(seen) == count:
            return


def _draws(count: int, seed: int) -> Iterator[int]:
    """Endless uniform numbers below ``count``, which may need more than 64 bits."""
    words = (count.bit_length() + 63) // 64 + 1
    stream = raw_stream(seed)
    while True:
        drawn = 0
        for word in stream.random_raw(words).tolist():
            drawn = (drawn << 64) | word
        # One word more than needed: the modulo's bias is below 2**-64.
        yield drawn % count

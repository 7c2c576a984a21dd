"""Generated tasks: right answers, disjoint splits, fixed by their seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.data.tasks import TASKS, generate
from rljob_trainer.errors import JobFileError


@pytest.mark.parametrize("digits", [1, 2, 3, 12, 40])
def test_addition_problems_add_two_numbers_of_exactly_so_many_digits(digits: int) -> None:
    for prompt, answer in generate("addition", split="train", digits=digits, size=80, seed=1):
        left, right = prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == digits
        assert int(left) + int(right) == int(answer)
        assert len(answer) == digits + 1


def test_copy_problems_repeat_digits_with_leading_zeros() -> None:
    problems = generate("copy", split="train", digits=3, size=None, seed=1)
    assert all(prompt == f"{answer}=" and len(answer) == 3 for prompt, answer in problems)
    assert any(answer.startswith("0") for _, answer in problems)


@pytest.mark.parametrize(("name", "digits", "count"), [("addition", 2, 90 * 90), ("copy", 3, 1000)])
def test_the_splits_are_disjoint_whatever_the_seeds_and_together_they_are_all(
    name: str, digits: int, count: int
) -> None:
    train = set(generate(name, split="train", digits=digits, size=None, seed=1))
    held_out = set(generate(name, split="validation", digits=digits, size=None, seed=2))
    assert train & held_out == set()
    assert len(train | held_out) == count
    assert 0.07 < len(held_out) / count < 0.13


def test_splits_of_a_task_too_large_to_list_are_disjoint() -> None:
    train = set(generate("copy", split="train", digits=9, size=3000, seed=1))
    held_out = set(generate("copy", split="validation", digits=9, size=3000, seed=1))
    assert len(train) == len(held_out) == 3000
    assert train & held_out == set()


@given(st.integers(0, 2**31 - 1), st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_a_smaller_size_gives_the_first_problems_of_a_larger_one(seed: int, size: int) -> None:
    large = generate("addition", split="train", digits=2, size=200, seed=seed)
    assert generate("addition", split="train", digits=2, size=size, seed=seed) == large[:size]
    assert len(set(large)) == 200


def test_the_seed_decides_which_problems() -> None:
    first, other = (generate("addition", split="train", digits=2, size=50, seed=s) for s in (1, 2))
    assert first != other


def test_impossible_tasks_are_refused() -> None:
    with pytest.raises(JobFileError, match="use one of addition, copy"):
        generate("subtraction", split="train", digits=2, size=1, seed=0)
    with pytest.raises(JobFileError, match=r"different validation problems, fewer than its size = 4,096"):
        generate("addition", split="validation", digits=2, size=4096, seed=0)
    with pytest.raises(JobFileError, match="too many to use all"):
        generate("addition", split="train", digits=4, size=None, seed=0)


def test_different_numbers_are_different_problems() -> None:
    for task in TASKS.values():
        prompts = {task.problem(number, 2).prompt for number in range(task.count(2))}
        assert len(prompts) == task.count(2)

"""Rows read ahead: which, how far, and what happens when they cannot be read."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rljob_trainer.data.ahead import ReadAhead


class Pages:
    """Rows that are their own places; keeps what was asked for."""

    def __init__(self, rows: int, block: int) -> None:
        self.rows, self.block = rows, block
        self.asked: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def read(self, epoch: int, position: int) -> list[tuple[int, int]]:
        self.asked.append((epoch, position))
        self.threads.add(threading.current_thread().name)
        return [(epoch, i) for i in range(position, min(position + self.block, self.rows))]


def places(rows: int, epochs: int) -> list[tuple[int, int]]:
    return [(epoch, i) for epoch in range(epochs) for i in range(rows)]


@pytest.mark.parametrize(("rows", "block"), [(10, 4), (8, 4), (3, 64), (1, 1)])
def test_rows_come_in_order_over_the_ends_of_epochs(rows: int, block: int) -> None:
    pages = Pages(rows, block)
    ahead = ReadAhead(pages.read, rows, block, epochs=3)
    assert [ahead.take(*place) for place in places(rows, 3)] == places(rows, 3)
    assert (
        len(pages.asked) == len(set(pages.asked)) == 3 * -(-rows // block)
    )  # nothing twice, nothing beyond the last epoch
    assert all("prompts" in name for name in pages.threads)


def test_a_jump_starts_anew() -> None:
    ahead = ReadAhead(Pages(100, 8).read, 100, 8)
    assert [ahead.take(0, i) for i in range(5)] == [(0, i) for i in range(5)]
    assert [ahead.take(2, i) for i in range(90, 100)] == [(2, i) for i in range(90, 100)]
    assert ahead.take(3, 0) == (3, 0)
    assert ahead.take(0, 4) == (0, 4)


def test_little_is_read_ahead_until_it_is_taken_quickly() -> None:
    pages = Pages(10_000, 10)
    ahead = ReadAhead(pages.read, 10_000, 10)
    ahead.take(0, 0)
    assert len(ahead._coming) == 2
    slow = threading.Event()

    def read(epoch: int, position: int) -> list[tuple[int, int]]:
        slow.wait(0.002)
        return pages.read(epoch, position)

    hungry = ReadAhead(read, 10_000, 10)
    for i in range(1000):
        hungry.take(0, i)
    assert 2 < len(hungry._coming) <= 16


def finished(ahead: ReadAhead[Any]) -> None:
    """Waits until the reader has nothing to do."""
    for _ in range(1000):  # each block has the next one read
        ahead._reader.submit(int).result()


def test_an_epoch_can_be_read_before_anything_is_asked_for() -> None:
    pages = Pages(100, 8)
    ahead = ReadAhead(pages.read, 100, 8, epochs=2)
    ahead.read_through(1, 40, lambda: True)
    finished(ahead)
    assert pages.asked == [(1, position) for position in range(40, 100, 8)]
    assert ahead.take(0, 0) == (0, 0)


def test_an_epoch_is_read_as_long_as_that_is_of_use() -> None:
    pages = Pages(100, 8)
    ahead = ReadAhead(pages.read, 100, 8)
    ahead.read_through(0, 0, lambda: len(pages.asked) < 3)
    finished(ahead)
    assert pages.asked == [(0, 0), (0, 8), (0, 16)]


def test_what_is_asked_for_comes_between_the_blocks_of_an_epoch() -> None:
    pages, go_on = Pages(1000, 10), threading.Event()

    def read(epoch: int, position: int) -> list[tuple[int, int]]:
        go_on.wait(10)
        return pages.read(epoch, position)

    ahead = ReadAhead(read, 1000, 10)
    ahead.read_through(0, 0, lambda: True)
    with ThreadPoolExecutor(1) as other:
        taken = other.submit(ahead.take, 0, 500)
        while not ahead._coming:
            time.sleep(0.001)
        go_on.set()
        assert taken.result() == (0, 500)
    assert pages.asked[:2] == [(0, 0), (0, 500)]


def test_rows_that_cannot_be_read_are_an_error_each_time_they_are_asked_for() -> None:
    def read(epoch: int, position: int) -> list[int]:
        if position >= 4:
            raise OSError("the disk is gone")
        return list(range(position, position + 4))

    ahead = ReadAhead(read, 100, 4)
    ahead.read_through(0, 0, lambda: True)  # says nothing of them
    assert [ahead.take(0, i) for i in range(4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.take(0, 4)

"""Responses that lie on the shelf: the same numbers, no memory, no file behind, no harm from a full disk."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_episodes import named, same_tokens

from rljob_trainer.episodes.requests import GenerationResult
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.rollout.shelf import Shelf


def result(length: int, seed: int = 0) -> GenerationResult:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50_000, length).astype(np.int32)
    tokens = Tokens.sampled(ids, rng.standard_normal(length).astype(np.float32), ids % 7)
    return GenerationResult(named("0"), tokens, "stop")


def mapped(folder: Path) -> int:
    """Segments of this process that lie in the folder's file system without a name."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def same(one: GenerationResult, other: GenerationResult) -> bool:
    return same_tokens(one.tokens, other.tokens)


def test_the_numbers_stay_and_no_file_is_seen(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, segment_bytes=40_000)
    lengths = [1000, 90, 3, 5000, 0, 2500, 700]  # 12 bytes a token: one is larger than a segment, two stay in memory
    kept = [result(length, seed) for seed, length in enumerate(lengths)]
    for one in kept:
        shelf.keep(one)
    shelf.rest()
    assert all(same(one, result(length, seed)) for seed, (length, one) in enumerate(zip(lengths, kept, strict=True)))
    assert list(tmp_path.iterdir()) == []
    assert not kept[0].tokens.ids.flags.writeable
    shelf.close()
    assert same(kept[3], result(5000, 3))


def test_space_is_free_when_the_last_response_of_a_segment_is_gone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, segment_bytes=40_000)
    kept = [result(1500, seed) for seed in range(8)]  # two fill a segment
    for one in kept:
        shelf.keep(one)
    assert mapped(tmp_path) == 4
    del one, kept[1:6]
    assert mapped(tmp_path) == 2
    del kept[:]
    shelf.close()
    assert mapped(tmp_path) == 0


def test_a_small_response_does_not_keep_those_it_came_with(tmp_path: Path) -> None:
    together = np.arange(100_000, dtype=np.int32)
    tokens = Tokens.sampled(together, together.astype(np.float32), together)[:3]
    small = GenerationResult(named("0"), tokens, "stop")
    Shelf(tmp_path).keep(small)
    assert small.tokens.ids.base is None


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel refuses files above 100 KB, as it would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_without_room_responses_stay_in_memory_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(tmp_path, segment_bytes=1 << 20)
    kept = [result(1000, seed) for seed in range(3)]
    with caplog.at_level(logging.WARNING):
        for one in kept:
            shelf.keep(one)
    assert all(same(one, result(1000, seed)) for seed, one in enumerate(kept))
    assert [record.message for record in caplog.records] == [
        f"responses stay in the driver's memory: cannot store them in {tmp_path} ([Errno 27] File too large)"
    ]


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np
from rljob_trainer.record import unfinished
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.episodes.requests import BegunTurn, GenerationResult
from rljob_trainer.rollout.shelf import Shelf

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024

before, shelf, groups = peak(), Shelf(Path(sys.argv[1]), segment_bytes=8 << 20), {}
for ordinal in range(200):
    values = ((ordinal, np.int32), (-ordinal, np.float32), (ordinal, np.int32))
    ones = [np.full(10_000, value, dtype) for value, dtype in values]
    result = GenerationResult(EpisodeId("", 0, 0), Tokens.sampled(*ones), "stop")
    shelf.keep(result)
    again = [GenerationResult(EpisodeId("", 0, 0), Tokens.sampled(*ones), "stop") for _ in range(15)]
    for one in again:
        shelf.keep(one)
    made = enumerate([result, *again])
    groups[ordinal] = {EpisodeId("training", ordinal, i): BegunTurn(0, one.tokens) for i, one in made}
unfinished.write(groups, Path(sys.argv[1]), shelf.rest)
back = unfinished.read(Path(sys.argv[1]), versions_later=0, keep=shelf.put)
print(peak() - before)
assert all(([*back[o].values()][15].tokens.log_probs == -o).all() and len(back[o]) == 16 for o in range(200))
"""


def test_neither_waiting_nor_a_checkpoint_takes_memory(tmp_path: Path) -> None:
    """3,200 responses, 384 MB: kept, written and read by a process that grows by no more than a few segments."""
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 150

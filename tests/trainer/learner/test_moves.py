"""What goes to a GPU and back: streams that are played here, since there is no GPU, and tensors whose device is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rljob_trainer.learner import moves
from rljob_trainer.learner.adamw import AdamW
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.muon import Muon
from rljob_trainer.learner.settings import OptimizerSettings

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


class PlayedStream:
    """A stream that writes down what it is asked."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self._diary = name, diary

    def wait_stream(self, other: PlayedStream) -> None:
        self._diary.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the device, in order."""
    told: list[str] = []
    current = [PlayedStream("computing", told)]

    @contextmanager
    def on(stream: PlayedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        told.append("pin")
        return tensor.clone()

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        told.append(f"{current[-1].name} copies to {device}{' without waiting' * non_blocking}")
        return tensor.detach()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: PlayedStream("copying", told))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: told.append(f"memory is held for {stream.name}")
    )
    moves._uploads.cache_clear()
    yield told
    moves._uploads.cache_clear()


def test_what_goes_to_a_gpu_is_pinned_and_copied_beside_what_it_computes(diary: list[str]) -> None:
    sent = moves.upload(torch.arange(3), GPU)
    assert sent.tolist() == [0, 1, 2]
    assert diary == [
        "pin",
        "copying copies to cuda:0 without waiting",
        "computing waits for copying",
        "memory is held for computing",
    ]


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert moves.upload(tensor, HOST) is tensor


def test_what_rests_has_one_place_of_its_own() -> None:
    resting = moves.Resting()
    tensors = [torch.arange(4.0), torch.ones(2, 3), torch.tensor(5), torch.arange(3, dtype=torch.bfloat16)]
    first = resting.rest("moments", tensors)
    assert all(torch.equal(there, tensor) for there, tensor in zip(first, tensors, strict=True))
    assert [there.dtype for there in first] == [tensor.dtype for tensor in tensors]
    tensors[0].mul_(2)
    second = resting.rest("moments", tensors)
    assert [there.data_ptr() for there in second] == [there.data_ptr() for there in first]
    assert all(torch.equal(there, tensor) for there, tensor in zip(second, tensors, strict=True))
    # Others, other places.
    assert resting.rest("steps", tensors)[0].data_ptr() != first[0].data_ptr()
    assert torch.equal(second[0], tensors[0])


class OfAGpu(torch.Tensor):
    """A tensor in host memory that says that it is in a GPU's."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def of_sizes(*sizes: int) -> list[torch.Tensor]:
    """Tensors of float32 with so many bytes and numbers of their own."""
    return [(torch.arange(size // 4) + 1000.0 * index).as_subclass(OfAGpu) for index, size in enumerate(sizes)]


def test_what_comes_from_a_gpu_rests_in_few_pinned_pieces_of_powers_of_two(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "_PIECE", 4096)
    pieces: list[torch.Tensor] = []

    def pinned(nbytes: int) -> torch.Tensor:
        pieces.append(torch.empty(nbytes, dtype=torch.uint8))
        return pieces[-1]

    resting = moves.Resting(pinned)
    # 5,000 bytes take 5,120 of 8,192, and 3,000 find room behind them (3,072). 2,048 and 2,044 share a piece, and what
    # is left, 12 bytes, gets the least.
    tensors = of_sizes(12, 3000, 2048, 5000, 2044)
    for _ in range(2):
        there = resting.rest("moments", tensors)
        assert all(torch.equal(one, tensor) for one, tensor in zip(there, tensors, strict=True))
        assert [piece.nbytes for piece in pieces] == [8192, 4096, 256]
    bases = [one.untyped_storage().data_ptr() for one in there]
    assert bases == [pieces[piece].data_ptr() for piece in (2, 0, 1, 0, 1)]


def test_memory_that_cannot_be_pinned_is_ordinary_memory_and_said_once(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(moves, "_PIECE", 1024)
    asked = []
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(args)
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    resting, tensors = moves.Resting(), of_sizes(1000, 1000)
    for name in ("first", "second"):
        there = resting.rest(name, tensors)
        assert all(torch.equal(one, tensor) for one, tensor in zip(there, tensors, strict=True))
    assert asked == [(1024,)]
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA cannot pin 1024 bytes of host memory: moves take longer (CUDA error: out of memory)"
    ]


@pytest.mark.parametrize("rule", [AdamW, Muon])
def test_an_optimizer_s_state_rests_in_the_host_and_comes_back(
    rule: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended GPU, twice: the second rest is in the memory of the first."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    with FakeTensorMode():
        parameters = [
            torch.nn.Parameter(torch.empty(4, 4, device=GPU)),
            torch.nn.Parameter(torch.empty(3, 4, device=GPU)),
        ]
        optimizer = rule(parameters, OptimizerSettings(), Layout())
        places = []
        for _ in range(2):
            assert {tensor.device for tensor in optimizer.state(0).values()} == {GPU}
            optimizer.move(HOST)
            assert {tensor.device for tensor in optimizer.state(0).values()} == {HOST}
            places.append([id(tensor) for tensor in optimizer.state(0).values()])
            optimizer.move(GPU)
        assert {tensor.device for tensor in optimizer.state(1).values()} == {GPU}
    assert places[0] == places[1]
    assert waited

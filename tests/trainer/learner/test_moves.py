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


def test_what_rests_has_one_place_of_its_own_that_is_pinned_once() -> None:
    pinned: list[torch.Tensor] = []
    resting = moves.Resting(pinned.append)
    tensors = [torch.arange(4.0), torch.ones(2, 3)]
    first = resting.rest("moments", tensors)
    assert all(torch.equal(there, tensor) for there, tensor in zip(first, tensors, strict=True))
    assert not {there.data_ptr() for there in first} & {tensor.data_ptr() for tensor in tensors}
    tensors[0].mul_(2)
    second = resting.rest("moments", tensors)
    assert [there.data_ptr() for there in second] == [there.data_ptr() for there in first]
    assert torch.equal(second[0], tensors[0])
    assert [tensor.data_ptr() for tensor in pinned] == [there.data_ptr() for there in first]
    # Others, other places.
    assert resting.rest("steps", tensors)[0].data_ptr() != first[0].data_ptr()


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


@pytest.mark.parametrize("size", [(1 << 20) // 4, 8])
def test_large_memory_is_pinned_where_it_is(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
            asked.append((address, nbytes))
            return 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tensor = torch.empty(size)
    moves.pin(tensor)
    # What shares pages with others is left alone.
    assert asked == ([(tensor.data_ptr(), 1 << 20)] if size > 8 else [])
    assert ("cannot pin 1048576 bytes" in caplog.text) == (size > 8)

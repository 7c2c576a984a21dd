"""What goes to a GPU and back: streams that are played here, since there is no GPU, and tensors whose device is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_for import cut_for
from torch._subclasses.fake_tensor import FakeTensorMode

from rljob_trainer.learner import moves
from rljob_trainer.learner.adamw import AdamW
from rljob_trainer.learner.anchor import Anchor
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.moves import ModuleMoves, Resting
from rljob_trainer.learner.muon import Muon
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

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
        "CUDA cannot pin 1024 bytes of host memory: copies are slower (CUDA error: out of memory)"
    ]


def travelled(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, moves_it: bool) -> Any:
    """Two updates and a score. Before each of them all models rest, and work from where they rest: a CPU is where both
    a rank and its host's memory are."""
    learner = Fsdp2().start(settings, rank, address)
    mini_batch = [range(len(batch))]
    share = cut_for(batch, mini_batch, ranks=settings.ranks, token_budget=1000).shares[rank]
    models = {"actor": learner.actor.module, "critic": learner.critic.module, "reference": learner._reference}
    names = {name: {n: id(p) for n, p in model.named_parameters()} for name, model in models.items()}
    movers = {name: ModuleMoves(model, learner._layout) for name, model in models.items()}
    places = []
    for work in (
        lambda: learner.update(share, LossSettings(), UpdateRequest(update_critic=True)),
        lambda: learner.update(share, LossSettings(), UpdateRequest(update_critic=True)),
        lambda: learner.score(share, ScoreRequest(log_probs=True, reference=True, values=True)),
    ):
        if moves_it:
            for name, model in models.items():
                movers[name](HOST)
                learner._layout.release(model)
                tensors = [*model.parameters(), *model.buffers()]
                pieces = {learner._layout.local(t.detach()).untyped_storage().data_ptr() for t in tensors}
                places.append((name, len(pieces)))
                assert {n: id(p) for n, p in model.named_parameters()} == names[name]
        done = work()
    state = {shard.name: shard.tensor.clone() for part in learner._trained for shard in part.state()}
    return state, done.streams, places


@pytest.mark.parametrize(
    ("count", "dtype", "tied"),
    [(1, "float32", True), (1, "bfloat16", False), (2, "bfloat16", True), (2, "float32", False)],
)
def test_a_model_that_rested_is_the_model_that_it_was(
    count: int,
    dtype: Any,
    tied: bool,
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    tied_folder: Path,
    untied_folder: Path,
) -> None:
    rule = OptimizerSettings(learning_rate=1e-3)
    folder = tied_folder if tied else untied_folder
    settings = LearnerSettings(folder, dtype=dtype, ranks=count, actor=rule, critic=rule, reference=True, lanes=1)
    still, moved = (ranks.run(count, travelled, settings, make_batch(), moves_it) for moves_it in (False, True))
    for (state, streams, none), (after, others, places) in zip(still, moved, strict=True):
        assert not none
        assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
        assert all((others[name] == stream).all() for name, stream in streams.items())
        # Small models take one piece each: everything rests in it but what FSDP2 pads.
        assert len(places) == 9
        assert all(number <= 1 + 4 * (count > 1) for _, number in places)


def test_a_module_of_a_gpu_rests_in_pinned_memory(gpu: None) -> None:
    """One piece for parameters and buffers of any dtype, pinned once; a matrix that stands in two places has one."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("frequencies", torch.arange(3, dtype=torch.float64))
    expected = [tensor.clone() for tensor in (*module.parameters(), *module.buffers())]
    asked: list[int] = []

    def pinned(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    class OnGpu(Layout):
        def local(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.as_subclass(OfAGpu)

    moved = ModuleMoves(module, OnGpu(), Resting(pinned))
    for _ in range(2):
        moved(HOST)
        tensors = [*module.parameters(), *module.buffers()]
        assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))
        assert module[1].weight is module[0].weight
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    # 256 bytes for the matrix (8 x 8 x 4), a beginning at 256 for each of the others.
    assert asked == [1024]


def test_the_weights_that_a_version_began_with_wait_in_pinned_memory_and_change_places(gpu: None) -> None:
    """One copy, pinned once, however often it is kept and put in place; a pass that fails leaves everything right."""
    module = torch.nn.Linear(8, 8)
    asked: list[int] = []

    def pinned(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    class OnGpu(Layout):
        def local(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.as_subclass(OfAGpu)

    anchor = Anchor(module, OnGpu(), Resting(pinned))

    def failing_pass(first: list[torch.Tensor]) -> None:
        with anchor.in_place():
            assert all(torch.equal(one, was) for one, was in zip(module.parameters(), first, strict=True))
            raise ZeroDivisionError

    for version in range(2):
        first = [tensor.detach().clone() for tensor in module.parameters()]
        anchor.keep(version)
        with torch.no_grad():
            for tensor in module.parameters():
                tensor += 1
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                failing_pass(first)
            assert all(torch.equal(one, was + 1) for one, was in zip(module.parameters(), first, strict=True))
    # 256 bytes for the matrix (8 x 8 x 4), and a beginning at 256 for the bias.
    assert asked == [512]


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

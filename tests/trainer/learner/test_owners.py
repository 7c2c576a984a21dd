"""Ranks add up their own shards, in whatever layout they have them: together that is the manifest of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.layout import Fsdp2Layout
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import added_up, manifest_of
from rljob_trainer.weights.owners import sums_of_shards
from rljob_trainer.weights.residence import sums_in_any_order
from rljob_trainer.weights.shards import Shard as Box

Sums = dict[str, int]
SHAPES = {"even": (8, 6), "uneven": (7, 5), "fewer": (3, 11), "vector": (9,), "deep": (5, 3, 7), "long": (1203, 37)}


class Net(nn.Module):
    """Parameters whose rows do not go into ranks evenly: FSDP2 pads them, and leaves some ranks without any."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value.bfloat16() if name == "long" else value))


def start(rank: int, address: str, count: int) -> None:
    host, _, port = address.rpartition(":")
    store = torch.distributed.TCPStore(host, int(port), count, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)


def fully_sharded(rank: int, address: str, count: int) -> tuple[Sums, Sums]:
    start(rank, address, count)
    net = Net()
    whole = dict(manifest_of(net.named_parameters()).sums)
    fully_shard(net, mesh=init_device_mesh("cpu", (count,)))
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    return sums_of_distributed(net.named_parameters()), whole


def sums_of_distributed(named: Any) -> Sums:
    layout = Fsdp2Layout(None)
    return sums_of_shards(layout.shard(name, tensor, layout.local(tensor.detach())) for name, tensor in named)


def placed(rank: int, address: str, shape: tuple[int, ...], placements: list[Any]) -> tuple[Sums, Sums]:
    start(rank, address, torch.Size(shape).numel())
    names = tuple(f"dim{number}" for number in range(len(shape)))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    values = dict(Net().named_parameters())
    named = {name: value.detach() for name, value in values.items() if value.ndim > 1}
    parts = {name: distribute_tensor(value, mesh, placements) for name, value in named.items()}
    return sums_of_distributed(parts.items()), dict(manifest_of(named.items()).sums)


def of_learner(rank: int, address: str, settings: LearnerSettings) -> tuple[Sums, Sums, Sums, Sums]:
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    whole = {name: tensor.clone() for name, tensor in learner.named_parameters_for_publish()}
    return (
        dict(learner_side.sums(learner)),
        dict(manifest_of(whole.items()).sums),
        dict(learner_side.sums(learner, in_any_order=True)),
        sums_in_any_order(whole.items()),
    )


@pytest.mark.slow(stands_for="[2]")
@pytest.mark.parametrize("count", [2, 4])
def test_fully_sharded_parameters_add_up(ranks: Any, count: int) -> None:
    told = ranks.run(count, fully_sharded, count)
    assert added_up(own for own, _ in told) == told[0][1]


@pytest.mark.slow(stands_for="[(2, 2)-[Replicate(), Shard(dim=0)]]")
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((2,), [Shard(1)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
    ids=str,
)
def test_other_layouts_add_up_to_the_same(ranks: Any, shape: tuple[int, ...], placements: list[Any]) -> None:
    told = ranks.run(torch.Size(shape).numel(), placed, shape, placements)
    assert added_up(own for own, _ in told) == told[0][1]


@pytest.mark.slow(stands_for=["[float32-1]", "[bfloat16-2]"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learners_ranks_add_up_to_what_they_publish(ranks: Any, tied_folder: Path, count: int, dtype: Any) -> None:
    told = ranks.run(count, of_learner, LearnerSettings(tied_folder, ranks=count, dtype=dtype))
    assert added_up(own for own, *_ in told) == told[0][1]
    assert added_up(own for _, _, own, _ in told) == told[0][3]
    assert len(told[0][1]) > 10


def test_what_another_rank_answers_for_is_not_added() -> None:
    tensor = torch.ones(3)
    alike = [Box("x", (3,), (0,), tensor, answers=answers) for answers in (True, False)]
    assert sums_of_shards(alike[:1]) == manifest_of([("x", tensor)]).sums
    assert sums_of_shards(alike[1:]) == {}

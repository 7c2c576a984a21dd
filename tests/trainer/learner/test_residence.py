"""Which parts are on the device when; the moves are recorded, the device is one that does not exist here."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.learner.residence import Residence

pytestmark = pytest.mark.integrity

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
NAMES = ("actor", "actor optimizer", "critic", "critic optimizer", "reference")


def residence(
    idle_in_host: bool, device: torch.device = DEVICE
) -> tuple[Residence, dict[str, torch.device], list[str]]:
    where = dict.fromkeys(NAMES, device)
    moves: list[str] = []

    def mover(name: str) -> object:
        def move(to: torch.device) -> None:
            where[name] = to
            moves.append(name)

        return move

    parts = {name: mover(name) for name in NAMES}
    return Residence(device, parts, idle_in_host=idle_in_host), where, moves  # type: ignore[arg-type]


def on_device(where: dict[str, torch.device]) -> set[str]:
    return {name for name, device in where.items() if device == DEVICE}


def test_everything_stays_unless_asked() -> None:
    home, where, moves = residence(idle_in_host=False)
    with home.working("actor"):
        pass
    assert moves == []
    home.evict(actor=False)
    assert on_device(where) == {"actor"}
    home.evict(actor=True)
    assert on_device(where) == set()
    home.settle()
    assert on_device(where) == set(NAMES)


def test_idle_parts_rest_in_host_memory() -> None:
    home, where, _ = residence(idle_in_host=True)
    assert on_device(where) == {"actor"}
    with home.working("critic", "critic optimizer"):
        assert on_device(where) == {"actor", "critic", "critic optimizer"}
    assert on_device(where) == {"actor"}
    with home.working():
        assert on_device(where) == set(NAMES)
    home.evict(actor=True)
    home.settle()
    assert on_device(where) == {"actor"}


@pytest.mark.parametrize("idle_in_host", [False, True])
def test_work_on_a_device_that_is_another_s_leaves_nothing_there(idle_in_host: bool) -> None:
    home, where, _ = residence(idle_in_host)
    home.evict(actor=False)
    with home.working("actor", "reference"):
        assert on_device(where) == {"actor", "reference"}
    assert on_device(where) == {"actor"}
    home.evict(actor=True)
    with home.working("actor"):
        assert on_device(where) == {"actor"}
    assert on_device(where) == set()
    home.settle()
    assert on_device(where) == ({"actor"} if idle_in_host else set(NAMES))


def test_a_cpu_has_one_place() -> None:
    home, _, moves = residence(idle_in_host=True, device=HOST)
    with home.working():
        home.evict(actor=True)
    home.settle()
    assert moves == []

"""What ends a broadcast that never would: the meeting is called off, an error, at last the deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rljob_trainer.errors import EngineError
from rljob_trainer.stores import reach_store, serve_store
from rljob_trainer.weights import group as module
from rljob_trainer.weights.group import CalledOffError, WeightGroup, WeightLink, call_off
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.receiver import Receiver
from rljob_trainer.weights.sender import Publisher

DEADLINE = 30.0
NOTICED = 5.0
"""Seconds: far from any deadline, also on a busy machine."""


class Unfinished:
    """A broadcast to a process that is gone: NCCL shows no error, and no end."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> None:
        time.sleep(DEADLINE)
        raise RuntimeError("Operation timed out!")


class Failed:
    """A broadcast that the backend has given up."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("[source.cc:1] NCCL error: remote process exited or there was a network error. Try again")


@pytest.fixture
def store() -> tuple[Any, WeightLink]:
    served, address = serve_store("127.0.0.1")
    return served, WeightLink(address, 1, ("the learner", "engine 0"))


@pytest.fixture
def groups(store: tuple[Any, WeightLink]) -> Iterator[list[WeightGroup]]:
    """Sender and receiver of a group of two."""
    served, link = store
    with ThreadPoolExecutor(1) as other:
        joins = other.submit(WeightGroup, link, 1, timeout=DEADLINE)
        opened = [WeightGroup(link, 0, timeout=DEADLINE, store=served), joins.result(DEADLINE)]
    yield opened
    for group in opened:
        group.close()


def calls_off(link: WeightLink) -> None:
    threading.Timer(0.3, call_off, (link, "engine 0 died")).start()


@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_waits_for_a_dead_engine_stops_when_the_meeting_is_called_off(
    groups: list[WeightGroup], rank: int
) -> None:
    calls_off(groups[0].link)
    began = time.monotonic()
    with pytest.raises(CalledOffError, match="engine 0 died"):
        groups[rank].wait(Unfinished(), began + DEADLINE)
    assert time.monotonic() - began < NOTICED


def test_an_error_of_the_backend_ends_the_wait_with_its_reason(groups: list[WeightGroup]) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"^NCCL error: remote process exited or there was a network error$"):
        groups[0].wait(Failed(), began + DEADLINE)
    assert time.monotonic() - began < NOTICED


def test_a_broadcast_without_an_end_ends_at_its_deadline(groups: list[WeightGroup]) -> None:
    with pytest.raises(ConnectionError, match="no end after"):
        groups[0].wait(Unfinished(), time.monotonic() + 0.3)


def test_a_member_that_dies_before_it_connects_does_not_hold_up_the_sender(store: tuple[Any, WeightLink]) -> None:
    served, link = store
    module.dist.PrefixStore("weights/1", reach_store(link.address)).set("here/1", "")
    calls_off(link)
    began = time.monotonic()
    with pytest.raises(CalledOffError, match="engine 0 died"):
        WeightGroup(link, 0, timeout=DEADLINE, store=served)
    assert time.monotonic() - began < NOTICED


def test_a_sender_that_is_gone_is_noticed_while_connections_are_made(store: tuple[Any, WeightLink]) -> None:
    """One byte goes to everybody when a group is opened: NCCL connects at the first broadcast, not before."""
    served, link = store
    module.dist.PrefixStore("weights/1", served).set("go", "")
    calls_off(link)
    began = time.monotonic()
    with pytest.raises(CalledOffError, match="engine 0 died"):
        WeightGroup(link, 1, timeout=DEADLINE)
    assert time.monotonic() - began < NOTICED


def test_opening_a_group_connects_its_members(store: tuple[Any, WeightLink]) -> None:
    served, link = store
    sent: list[torch.Tensor] = []
    broadcast = module._broadcast

    def remember(group: Any, tensor: torch.Tensor) -> Any:
        sent.append(tensor)
        return broadcast(group, tensor)

    with patch.object(module, "_broadcast", remember), ThreadPoolExecutor(1) as other:
        joins = other.submit(WeightGroup, link, 1, timeout=DEADLINE)
        opened = [WeightGroup(link, 0, timeout=DEADLINE, store=served), joins.result(DEADLINE)]
    assert [tensor.nbytes for tensor in sent] == [1, 1]
    for group in opened:
        group.close()


def test_under_the_name_of_nccl_a_publication_differs_in_its_process_group_alone(
    store: tuple[Any, WeightLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch makes no NCCL group without a GPU: gloo's stands in for it, and all else is what runs on GPUs."""
    made: list[int] = []

    class StandsIn:
        Options = type("Options", (), {})

        def __new__(cls, place: Any, rank: int, size: int, options: Any) -> Any:
            made.append(rank)
            gloo = module.dist.ProcessGroupGloo
            settings = gloo._Options()
            settings._timeout = options._timeout
            settings._devices = [gloo.create_device(hostname="127.0.0.1")]
            return gloo(place, rank, size, settings)

    monkeypatch.setattr(module.dist, "ProcessGroupNCCL", StandsIn)
    # Both members are in this process, whose variables the two would set and take back beside each other.
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    publisher = Publisher(1 << 20, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 0"), "nccl")
    named = {f"w{number}": torch.randn(300, 1000 * number + 1) for number in range(4)}
    arrived: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(1) as other:
        joins = other.submit(Receiver, link, 1, timeout=DEADLINE)
        publisher.connect(link, DEADLINE)
        receiver = joins.result(DEADLINE)
        takes = other.submit(receiver.receive, 1, arrived.update, lambda name: None, DEADLINE)
        publisher.publish(describe(named.items()), named.items(), 1, DEADLINE)
        takes.result(DEADLINE)
    assert sorted(made) == [0, 1]
    assert all(torch.equal(arrived[name], tensor) for name, tensor in named.items())
    receiver.close()
    publisher.disconnect()


def test_an_nccl_group_gets_no_watchdog_and_others_keep_theirs(store: tuple[Any, WeightLink]) -> None:
    """torch's watchdog ends the process of whoever was in a broadcast with a dead engine: rank 0."""
    served, address = store[0], store[1].address
    link = WeightLink(address, 1, ("the learner", "engine 0"), "nccl")
    module.dist.PrefixStore("weights/1", served).set("here/1", "")
    seen: list[str | None] = []

    class Recorded:
        """torch's own refuses to be made on a machine without a GPU, before it reads its settings."""

        Options = type("Options", (), {})

        def __init__(self, *_: Any) -> None:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
            raise RuntimeError("no GPU")

    with (
        patch.object(module.dist, "ProcessGroupNCCL", Recorded),
        pytest.raises(EngineError, match=r"the learner could not connect with weight group 1 \(no GPU\)"),
    ):
        WeightGroup(link, 0, timeout=DEADLINE, store=served)
    assert seen == ["1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ

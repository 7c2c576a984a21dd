"""Publication between real processes: bytes arrive, memory stays bounded, and every failure has a name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.weights import group, ipc
from rljob_trainer.weights.blocks import block_of, lay_out
from rljob_trainer.weights.group import WeightGroup, WeightLink, call_off
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.plan import TensorMeta, WeightPlan, describe
from rljob_trainer.weights.sender import Publisher, SendReport

pytestmark = pytest.mark.integrity

SCRIPT = Path(__file__).with_name("weight_member.py")
_spec = importlib.util.spec_from_file_location("weight_member", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
weight_member = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(weight_member)

BUCKET = 1 << 20


class Member:
    """A receiver process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], list[Member]]]:
    """Receiver processes, kept between tests as long as they live."""
    alive: list[Member] = []

    def get(count: int) -> list[Member]:
        alive[:] = [member for member in alive if member.process.poll() is None]
        new = [Member(f"engine {len(alive) + i}") for i in range(count - len(alive))]
        for member in new:
            assert member.hear() == {"ready": True}
        alive.extend(new)
        return alive[:count]

    yield get
    for member in alive:
        member.end()


class Meeting:
    """A publisher and receivers that have joined it."""

    def __init__(self, members: list[Member], backend: str = "gloo", **join: Any) -> None:
        self.members = members
        self.backend = backend
        self.publisher = Publisher(BUCKET, "127.0.0.1")
        self.generation = 0
        self.pool = ThreadPoolExecutor(1)
        self.connect(members, **join)

    def connect(self, members: list[Member], **join: Any) -> None:
        self.members = members
        self.generation += 1
        names = ("the learner", *(f"engine {i}" for i in range(len(members))))
        self.link = WeightLink(self.publisher.address, self.generation, names, self.backend)
        for rank, member in enumerate(members, 1):
            order = {
                "address": self.link.address,
                "generation": self.generation,
                "names": self.link.names,
                "backend": self.backend,
                "rank": rank,
            }
            member.tell(do="join", timeout=20, **order, **join)
        self.publisher.connect(self.link, 20)
        assert [member.hear() for member in members] == [{"joined": True}] * len(members)

    def send(self, version: int, timeout: float = 20) -> Future[SendReport]:
        named = weight_member.model(version)
        return self.pool.submit(self.publisher.publish, describe(named.items()), named.items(), version, timeout)

    def publish(self, version: int, **order: Any) -> tuple[SendReport, list[dict[str, Any]]]:
        for member in self.members:
            member.tell(do="receive", version=version, timeout=20, **order)
        report = self.send(version).result(30)
        return report, [member.hear() for member in self.members]


# ---------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("way", [{}, {"in_place": True}])
@pytest.mark.parametrize(("backend", "receivers"), [("gloo", 2), ("ipc", 1)])
def test_every_byte_arrives_at_every_receiver_for_every_version(
    processes: Callable[[int], list[Member]], backend: str, receivers: int, way: dict[str, Any]
) -> None:
    meeting = Meeting(processes(receivers), backend)
    for version in (3, 4, 4, 9):
        report, answers = meeting.publish(version, **way)
        expected = weight_member.fingerprint(weight_member.model(version))
        assert [answer["fingerprint"] for answer in answers] == [expected] * receivers
        assert report.version == manifest_of(weight_member.model(version).items()).version(version)
        assert [answer["manifest"] for answer in answers] == [report.version.manifest_sha256] * receivers
        assert report.nbytes == sum(tensor.nbytes for tensor in weight_member.model(0).values())


def test_no_process_holds_more_than_two_buckets(processes: Callable[[int], list[Member]]) -> None:
    """A bucket is 1 MB here, or the largest tensor (2.2 MB): nothing is ever split."""
    largest = 601 * 900 * 4
    for way in ({}, {"in_place": True}):
        meeting = Meeting(processes(1))
        report, (answer,) = meeting.publish(1, **way)
        assert 0 < report.peak_buffer_bytes <= 2 * largest
        # What is received in place needs no memory of its own.
        assert (answer["peak"] == 0) == bool(way)
        assert answer["peak"] <= 2 * largest


def test_what_lies_together_is_neither_copied_to_be_sent_nor_to_be_received(
    processes: Callable[[int], list[Member]],
) -> None:
    meeting = Meeting(processes(1))
    named = weight_member.model(5)
    metas = describe(named.items())
    aliases = {name: tensor.clone() for name, tensor in named.items()}
    for pack in WeightPlan(metas, BUCKET).packs:
        members = [named[meta.name] for meta in pack.tensors]
        assert block_of(members, pack) is None
        lay_out(members, pack)
        block = block_of(members, pack)
        assert block is not None
        assert block.data_ptr() == members[0].data_ptr()
    assert all(torch.equal(named[name], aliases[name]) for name in named)
    sent: list[int] = []
    broadcast = WeightGroup.broadcast

    def remember(group: WeightGroup, tensor: torch.Tensor) -> Any:
        sent.append(tensor.data_ptr())
        return broadcast(group, tensor)

    meeting.members[0].tell(do="receive", version=5, timeout=20, in_place=True)
    with patch.object(WeightGroup, "broadcast", remember):
        meeting.publisher.publish(metas, named.items(), 5, 20)
    answer = meeting.members[0].hear()
    assert answer["fingerprint"] == weight_member.fingerprint(named)
    assert answer["peak"] == 0
    assert set(sent) <= {tensor.data_ptr() for tensor in named.values()}


def test_the_set_of_receivers_may_change_between_publications(processes: Callable[[int], list[Member]]) -> None:
    first, second = processes(2)
    meeting = Meeting([first])
    meeting.publish(1)
    for members in ([first, second], [second]):
        meeting.connect(members)
        _, answers = meeting.publish(2)
        expected = weight_member.fingerprint(weight_member.model(2))
        assert all(answer["fingerprint"] == expected for answer in answers)


# ---------------------------------------------------------------------- failures have names


def test_a_corrupted_byte_is_noticed_and_the_receiver_named(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(2))
    good, bad = meeting.members
    good.tell(do="receive", version=1, timeout=20)
    bad.tell(do="receive", version=1, timeout=20, corrupt=True)
    with pytest.raises(EngineError, match=r"engine 1: EngineError: .*different bytes than were sent, in 1 of 7"):
        meeting.send(1).result(30)
    assert "fingerprint" in good.hear()
    assert "engine 1 received different bytes" in bad.hear()["message"]
    with pytest.raises(EngineError, match="no engine is connected"):
        meeting.send(2).result(30)


def test_a_receiver_that_cannot_load_is_named_with_its_reason(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(2))
    good, bad = meeting.members
    good.tell(do="receive", version=1, timeout=20)
    bad.tell(do="receive", version=1, timeout=20, fail_at="embed.weight")
    with pytest.raises(EngineError, match=r"engine 1: ValueError: cannot load embed\.weight"):
        meeting.send(1).result(30)
    good.hear()
    assert bad.hear()["message"] == "cannot load embed.weight"
    meeting.connect(meeting.members)
    meeting.publish(2)


def test_a_receiver_that_dies_on_the_way_is_named_in_time(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(2))
    survivor, victim = meeting.members
    survivor.tell(do="receive", version=1, timeout=60)
    victim.tell(do="receive", version=1, timeout=60, hang_at="embed.weight")
    sending = meeting.send(1, timeout=60)
    assert victim.hear() == {"hangs": True}
    victim.end()
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"engine 1 stopped answering while receiving weights"):
        sending.result(60)
    assert time.monotonic() - started < 30, "a death was noticed by the deadline only"
    assert survivor.hear()["error"] in ("CalledOffError", "EngineError")
    meeting.connect([survivor])
    meeting.publish(2)


def test_one_that_dies_while_it_is_handed_weights_is_not_waited_for(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(1), "ipc")
    (victim,) = meeting.members
    victim.tell(do="receive", version=1, timeout=60, hang_at="embed.weight")
    sending = meeting.send(1, timeout=60)
    assert victim.hear() == {"hangs": True}
    victim.end()
    held = stages()
    assert len(held) == 1
    call_off(meeting.link, "engine 0 died")  # as the driver does, whom Ray tells
    with pytest.raises(EngineError, match="called off, because engine 0 died"):
        sending.result(30)
    # What the dead one had hold of is nobody's any more.
    assert not stages()
    meeting.connect(processes(1))
    meeting.publish(2)
    assert not stages()


def stages() -> list[str]:
    """Memory that this process has shared by name, and that has not been given back."""
    return [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a build for CPUs")
def test_on_a_gpu_the_sender_counts_itself_out_for_a_receiver_that_is_dead() -> None:
    """torch keeps what it has handed over until the receiver's count, a number in shared memory, is no longer above
    zero (torch/csrc/CudaIPCTypes.h: 10,000 counts a file)."""
    counts = torch.zeros(10_000, dtype=torch.int64)
    storage: Any = counts.untyped_storage()
    _, name, _ = storage._share_filename_cpu_()
    counts[5:8] = 1
    handle = [{"bytes": ""}, 1 << 20, 0, {"bytes": name.hex()}, 6, {"bytes": ""}, False]
    ipc.take_back(json.dumps(handle), on_gpu=True)
    assert counts[4:9].tolist() == [0, 1, 0, 1, 0]


def test_a_late_receiver_is_waited_for_until_the_deadline_and_then_named(
    processes: Callable[[int], list[Member]],
) -> None:
    meeting = Meeting(processes(2))
    prompt, late = meeting.members
    prompt.tell(do="receive", version=1, timeout=20)
    sending = meeting.send(1)
    late.tell(do="receive", version=1, timeout=20)
    assert sending.result(30).version.number == 1
    assert [set(member.hear()) for member in meeting.members] == [{"fingerprint", "manifest", "peak", "nbytes"}] * 2
    prompt.tell(do="receive", version=2, timeout=1)
    with pytest.raises(
        DeadlineError,
        match=r"engine 1 did not start to receive version 2 within 0\.\d+ s: .*raise deadlines\.progressSeconds",
    ):
        meeting.send(2, timeout=0.5).result(30)
    assert "error" in prompt.hear()


def test_an_engine_that_never_joins_is_named() -> None:
    publisher = Publisher(BUCKET, "127.0.0.1")
    with pytest.raises(
        DeadlineError, match=r"engine 7 did not join weight group 1 within 0\.\d+ s: see the .*progressSeconds"
    ):
        publisher.connect(WeightLink(publisher.address, 1, ("the learner", "engine 7")), timeout=0.3)


def test_an_engine_that_waits_in_vain_says_for_whom_and_what_to_do() -> None:
    publisher = Publisher(BUCKET, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 7"))
    with pytest.raises(DeadlineError, match=r"engine 7 waited 0\.\d+ s in vain for .*the learner is busy"):
        WeightGroup(link, 1, timeout=0.3)
    with pytest.raises(
        DeadlineError, match=r"engine 7 could not reach the learner at 127\.0\.0\.1:1 within 1 s: .*firewall"
    ):
        WeightGroup(WeightLink("127.0.0.1:1", 1, link.names), 1, timeout=1.0)


def test_a_meeting_that_is_called_off_ends_at_once() -> None:
    publisher = Publisher(BUCKET, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 7"))
    threading.Timer(0.2, call_off, (link, "engine 7 is gone")).start()
    with pytest.raises(EngineError, match="called off, because engine 7 is gone"):
        publisher.connect(link, timeout=30)


def test_a_meeting_whose_sender_is_gone_needs_no_calling_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_REACH_SECONDS", 1.0)
    link = WeightLink("127.0.0.1:1", 1, ("the learner", "engine 7"))
    call_off(link, "the learner is gone")


def test_a_receiver_expecting_another_version_says_so(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(1))
    (member,) = meeting.members
    member.tell(do="receive", version=5, timeout=20)
    sending = meeting.send(6, timeout=2)
    assert "engine 0 expects version 5, but the learner publishes 6" in member.hear()["message"]
    with pytest.raises((DeadlineError, EngineError)):
        sending.result(30)


def test_parameters_that_differ_from_their_description_are_refused(processes: Callable[[int], list[Member]]) -> None:
    meeting = Meeting(processes(1))
    (member,) = meeting.members
    member.tell(do="receive", version=1, timeout=3)
    named = weight_member.model(1)
    metas = describe(named.items())
    named["layers.0.norm"] = torch.ones(8)
    with pytest.raises(EngineError, match=r"yielded layers\.0\.norm \(8,\).*where its plan has"):
        meeting.publisher.publish(metas, named.items(), 1, 20)
    assert "error" in member.hear()


# ---------------------------------------------------------------------- plan


def test_buckets_are_bounded_hold_everything_once_and_come_in_the_order_of_completion() -> None:
    sizes = [100, 900, 300, 2000, 10, 400, 400, 5, 1500, 7]
    metas = [TensorMeta(f"t{i}", (size,), torch.uint8) for i, size in enumerate(sizes)]
    plan = WeightPlan(metas, 1000)
    assert sorted(meta.name for bucket in plan.buckets for meta in bucket.tensors) == sorted(m.name for m in metas)
    order = {meta.name: i for i, meta in enumerate(metas)}
    last = [max(order[meta.name] for meta in bucket.tensors) for bucket in plan.buckets]
    assert last == sorted(last)
    for bucket in plan.buckets:
        assert bucket.nbytes <= 1000 or len(bucket.tensors) == 1
        assert all(offset % 16 == 0 for offset in bucket.offsets)
    assert plan.nbytes == sum(sizes)
    assert WeightPlan.from_json(plan.to_json()).buckets == plan.buckets


def test_what_travels_to_a_gpu_at_once_is_a_bucket_as_the_job_says() -> None:
    metas = [TensorMeta(f"layers.{number}", (32 << 20,), torch.uint8) for number in range(9)]
    plan = WeightPlan(metas, 256 << 20)
    assert plan.budget(torch.device("cuda", 0)) == 256 << 20
    # On gloo more is no faster.
    assert plan.budget(torch.device("cpu")) == 48 << 20


def test_a_receiver_asks_for_what_comes_next_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_trainer.weights.receiver import _Incoming

    said: list[str] = []

    class Group:
        def broadcast(self, tensor: torch.Tensor) -> None:
            said.append("receive")

        def wait(self, work: None, deadline: float) -> None:
            pass

    plan = WeightPlan([TensorMeta(f"w{number}", (1 << 20,), torch.uint8) for number in range(3)], 1 << 20)
    incoming = _Incoming(Group(), plan, lambda name: None, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in incoming.receive(0.0):
        said.append("load")
    assert said == ["receive", "receive", "load", "receive", "load", "load"]
    assert incoming.peak_buffer_bytes == 2 << 20

"""The processes of a weight broadcast: how they find each other, wait for each other and notice who is missing.

The sender is rank 0 and serves a small key-value store; members meet there and then open a process group of their own:
of gloo, of NCCL, or for two on one device what ``ipc.py`` puts in its place. All else is the same for the three.
The learner's default process group is not touched. A group has a generation: when the set of engines changes (or
anybody has failed) the next generation is opened on the same store and the old one forgotten.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.stores import reach_store
from rljob_trainer.weights import ipc, nccl_settings

log = logging.getLogger(__name__)

dist: Any = torch.distributed
"""Stores, groups and their options are missing from its type annotations."""

INTERRUPTED = "interrupted"
"""How the answer of a receiver begins that did nothing wrong."""
_POLL_SECONDS = 0.002
_LOOK_UP_SECONDS = 0.1
"""Between two looks at whether a meeting was called off, while bytes travel."""
_ABORT_SECONDS = {"nccl": 10.0, "gloo": 1.0, ipc.BACKEND: 1.0}
"""For a broken group to be taken down: NCCL may wait for a device that hangs. Gloo leaves nothing on one behind."""
_REACH_SECONDS = 5.0
"""For somebody outside the group to reach the sender's store."""
_GRACE_SECONDS = 2.0
"""After a broken broadcast: how long survivors have to say that they live."""


_REMEDY = "If the weights only need more time, raise deadlines.progressSeconds."


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.3g} s"


class CalledOffError(EngineError):
    """The meeting was ended because somebody else failed."""


@dataclass(frozen=True, slots=True)
class WeightLink:
    """All that a member needs to join: where, as whom, with whom."""

    address: str
    """``host:port`` of the sender's store."""
    generation: int
    names: tuple[str, ...]
    """Who the ranks are, in words for error messages; rank 0 is the sender."""
    backend: str = "gloo"
    """``gloo``; ``nccl`` where every member has a GPU of its own; ``ipc`` where each receiver has a device in common
    with a sender of its own."""
    senders: tuple[str, ...] = ()
    """``ipc``: the address of each receiver's sender, beginning with that of rank 1. Each pair is a group."""

    def seat(self, rank: int) -> tuple[WeightLink, int]:
        """The group that receiver ``rank`` is in, and as whom: this one, or the pair that it makes with its sender."""
        if not self.senders:
            return self, rank
        return WeightLink(self.senders[rank - 1], self.generation, (self.names[0], self.names[rank]), self.backend), 1

    def of_sender(self, address: str) -> WeightLink | None:
        """The group of the sender whose store has this address; None for one without a receiver."""
        if not self.senders:
            return self
        return self.seat(self.senders.index(address) + 1)[0] if address in self.senders else None


def call_off(link: WeightLink, reason: str) -> None:
    """Ends the waiting of all members of a group, from outside: they raise ``EngineError`` with the reason.

    When it was the sender that failed, its store may be gone with it: then the members' own connections have broken.
    """
    for address in link.senders or (link.address,):
        with suppress(dist.DistError):
            store = reach_store(address, timedelta(seconds=_REACH_SECONDS))
            dist.PrefixStore(_prefix(link), store).set("called off", reason)


def _prefix(link: WeightLink) -> str:
    return f"weights/{link.generation}"


class WeightGroup:
    """One generation of sender and receivers, as seen by ``rank``. ``DeadlineError`` when somebody does not come,
    ``EngineError`` when members were told different things of NCCL."""

    def __init__(
        self,
        link: WeightLink,
        rank: int,
        *,
        timeout: float,
        store: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.link, self.rank, self.names = link, rank, link.names
        deadline = time.monotonic() + timeout
        if store is None:
            try:
                store = reach_store(link.address, timedelta(seconds=timeout))
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                raise DeadlineError(
                    f"weights: {self.names[rank]} could not reach the learner at {link.address} within "
                    f"{timeout:.0f} s: the learner's process is gone, or connections between their hosts are blocked "
                    "(firewall, network policy)"
                ) from error
        self._store = dist.PrefixStore(_prefix(link), store)
        self.device = torch.device(device)
        settings = nccl_settings.told(os.environ if link.backend == "nccl" else {})
        self.post("here", settings)
        if rank == 0:
            others = self.gather("here", deadline, f"join weight group {link.generation}")
            if problem := nccl_settings.difference(settings, self.names[0], others):
                self._store.set("called off", problem)
                raise EngineError(f"weights: {problem}")
            self._store.set("go", "")
        else:
            self.read("go", deadline, f"the other members of weight group {link.generation}")
        self._group: Any = None
        self._open(max(1.0, timeout), deadline)

    def _open(self, timeout: float, deadline: float) -> None:
        """Opens the process group and sends one byte through it, by which every connection is made: NCCL makes its own
        at the first broadcast only, and waits without end for a member that has died by then.

        In a thread of its own, which is left behind when a member does not come: neither backend can be interrupted.
        """
        ended = threading.Event()
        result: list[Any] = []

        def work() -> None:
            group = None
            try:
                group = self._new_group(timeout)
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                result.extend((group, _broadcast(group, byte), byte))
            except Exception as error:  # noqa: BLE001 - told by whoever waits
                result.append(error)
            ended.set()

        threading.Thread(target=work, name="weight-group", daemon=True).start()
        began = time.monotonic()
        while not ended.wait(_LOOK_UP_SECONDS):
            self._check_called_off()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"weights: {self.names[self.rank]} waited {_since(began)} for connections with the other members "
                    f"of weight group {self.link.generation}, which have all joined: one of them died or hangs, or "
                    "their hosts cannot reach each other (firewall, network policy, NCCL_SOCKET_IFNAME)"
                )
        if isinstance(result[0], Exception):
            self._check_called_off()
            raise EngineError(
                f"weights: {self.names[self.rank]} could not connect with weight group {self.link.generation} "
                f"({_reason(result[0])})"
            ) from result[0]
        self._group, first, _ = result
        try:
            self.wait(first, deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, ConnectionError):
                problem = f"weights: the first byte in weight group {self.link.generation} did not arrive ({error})"
                raise EngineError(problem) from error
            raise

    def _new_group(self, timeout: float) -> Any:
        # Of its own: a store answers one question at a time, and this one is waited for.
        store = dist.PrefixStore("pg", self._store.clone())
        if self.link.backend == ipc.BACKEND:
            return ipc.HandOver(store, self.rank, self.device)
        if self.link.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            with _without_watchdog():
                return dist.ProcessGroupNCCL(store, self.rank, len(self.names), options)
        host, _, _ = self.link.address.rpartition(":")
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        # The address of this machine on the way to the sender: a host with several networks has to pick one.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])]
        return dist.ProcessGroupGloo(store, self.rank, len(self.names), options)

    # ------------------------------------------------------------------ words between members

    def post(self, key: str, value: str) -> None:
        """Says something under this member's name."""
        self._store.set(f"{key}/{self.rank}", value)

    def announce(self, key: str, value: str) -> None:
        """Says something to everybody."""
        self._store.set(key, value)

    def read(self, key: str, deadline: float, what: str) -> bytes:
        """What somebody announced; ``what`` is being waited for."""
        began = time.monotonic()
        while not self._store.check([key]):
            self._check_called_off()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"weights: {self.names[self.rank]} waited {_since(began)} in vain for {what}: {self.names[0]} is "
                    f"busy or hangs; see its log. {_REMEDY}"
                )
            time.sleep(_POLL_SECONDS)
        return bytes(self._store.get(key))

    def gather(self, key: str, deadline: float, what: str) -> dict[str, str]:
        """What every receiver posted under ``key``, by name. Names those that did not ``what`` in time."""
        began = time.monotonic()
        values, missing = self._gather(key, deadline, self._check_called_off)
        if missing:
            raise DeadlineError(
                f"weights: {', '.join(missing)} did not {what} within {_since(began)}: see the engine's log to find "
                f"where it hangs. {_REMEDY}"
            )
        return values

    def _check_called_off(self) -> None:
        if self._store.check(["called off"]):
            raise CalledOffError(f"weights: called off, because {self._store.get('called off').decode()}")

    def _gather(
        self, key: str, deadline: float, check: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, str], list[str]]:
        values: dict[str, str] = {}
        while True:
            check()
            for rank in range(1, len(self.names)):
                name = f"{key}/{rank}"
                if self.names[rank] not in values and self._store.check([name]):
                    values[self.names[rank]] = self._store.get(name).decode()
            missing = [name for name in self.names[1:] if name not in values]
            if not missing or time.monotonic() > deadline:
                return values, missing
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ data

    def broadcast(self, tensor: Tensor) -> Any:
        """Starts to send (rank 0) or receive ``tensor``; returns the work to ``wait`` for."""
        return _broadcast(self._group, tensor)

    def wait(self, work: Any, deadline: float) -> None:
        """Until a broadcast has completed. Raises ``ConnectionError`` when it fails or outlasts the deadline, and
        ``CalledOffError`` when the meeting is called off: NCCL notices no death on its own host."""
        began = looked_up = time.monotonic()
        try:
            # Asking also asks NCCL for errors of the connections; a broadcast that failed has completed.
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise RuntimeError(f"no end after {now - began:.0f} s")
                if now > looked_up + _LOOK_UP_SECONDS:
                    self._check_called_off()
                    looked_up = now
                time.sleep(min(_POLL_SECONDS, 5e-5 + (now - began) / 10))
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(_reason(error)) from error

    def rest(self) -> None:
        """Nothing travels until the next publication: what is held for the way is given back, by receivers first."""
        if isinstance(self._group, ipc.HandOver):
            self._group.rest()

    def blame(self, key: str, problem: str) -> EngineError:
        """After a failed broadcast: calls the meeting off, hears the others under ``key``, names who is to blame."""
        self._store.set("called off", problem)
        self.close()
        values, missing = self._gather(key, time.monotonic() + _GRACE_SECONDS)
        said = [f"{name}: {value}" for name, value in values.items() if not value.startswith(INTERRUPTED)]
        said += [f"{name} stopped answering while receiving weights" for name in missing]
        return EngineError("weights: " + ("; ".join(said) or "the broadcast broke off") + f" ({problem})")

    def close(self) -> None:
        """Ends the process group; whoever waits in it gets an error."""
        groups, self._group = [self._group], None
        if groups == [None]:
            return

        def work() -> None:
            # The last reference goes here: gloo's group ends when its operations have, and one that sends to a dead
            # member has the whole timeout of the group. One with a dead member may also complain.
            with suppress(RuntimeError):
                groups.pop().abort()

        thread = threading.Thread(target=work, name="weight-group-end", daemon=True)
        thread.start()
        seconds = _ABORT_SECONDS[self.link.backend]
        thread.join(seconds)
        if thread.is_alive():
            log.warning(
                "weights: %s left weight group %d, which could not be taken down within %.0f s",
                self.names[self.rank],
                self.link.generation,
                seconds,
            )


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.asyncOp = True
    return group.broadcast([tensor], options)


def _reason(error: BaseException) -> str:
    """A backend's error in short: Gloo begins with the place in its source and ends with advice."""
    return str(error).rpartition("] ")[2].split(". ")[0]


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Inside, a new NCCL group gets no watchdog. One would end this process, or tell the watchdog of the learner's own
    group to do so, because an engine died. Whoever waits looks for errors and deadlines anyway.

    torch starts none in the mode in which a wait holds up the process; we wait for what has completed only.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

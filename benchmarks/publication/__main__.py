"""One sender, one engine, the weights of SmolLM2-135M in float32 (538 MB): publication against a raw gloo broadcast.

    .venv/bin/python -m benchmarks.publication                   # the torch engine, then vLLM
    .venv/bin/python -m benchmarks.publication --engines torch
    .venv/bin/python -m benchmarks.publication.manifests         # adding up alone

Both take turns in the same two processes. *Raw* is one `broadcast` of all bytes in one buffer. *Publication* is what a
training step does, from the first gather to the last receiver's word that everything is loaded, with the manifest (both
sides read every byte once more) and without. The engine's *pause* is from the start of its update, between two steps,
until it may sample again; it waits for the first bytes, too. Memory is what the operating
system saw beyond the model, at its peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from benchmarks.environments import DEFAULT_CACHE
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from benchmarks.publication.raw import RawGroup, empty
from benchmarks.publication.receiving import Received, adding_up, receiver_process
from benchmarks.real_model.model import smollm2
from benchmarks.resident import PeakMemory
from rljob_trainer.weights import sender as sending
from rljob_trainer.weights.blocks import lay_out
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.plan import WeightPlan, describe
from rljob_trainer.weights.sender import SENDER, Publisher

HERE = Path(__file__).parent
EngineKind = Literal["torch", "vllm"]
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of all weights."""

    seconds: float
    sender_extra_bytes: int
    receiver_extra_bytes: int
    pause_seconds: float = 0.0
    """For how long the engine could make no token."""


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One engine's figures: spreads over the repetitions, ratios pair by pair (raw seconds over publication's)."""

    engine: EngineKind
    nbytes: int
    bucket_bytes: int
    raw_seconds: MeasuredSpread
    seconds_without_manifest: MeasuredSpread
    seconds_with_manifest: MeasuredSpread
    share_of_raw: MeasuredSpread
    share_of_raw_with_manifest: MeasuredSpread
    pause_seconds: MeasuredSpread
    """The engine's, with manifest."""
    sender_extra_bytes: int
    receiver_extra_bytes: int


class Bench:
    """The sender's process, with the receiver's at the other end of a pipe."""

    def __init__(self, engine: EngineKind, folder: Path, bucket_bytes: int) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.metas = describe(self.tensors.items())
        for pack in WeightPlan(self.metas, bucket_bytes).packs:  # as a learner does
            lay_out([self.tensors[meta.name] for meta in pack.tensors], pack)
        self.nbytes = sum(meta.nbytes for meta in self.metas)
        self.version = 0
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far_end = spawn.Pipe()
        self.process = spawn.Process(target=receiver_process, args=(far_end, engine, str(folder)), daemon=True)
        self.process.start()
        far_end.close()  # so that the end of the process is the end of the pipe
        self.answer()
        self.publisher = Publisher(bucket_bytes, "127.0.0.1")
        link = WeightLink(self.publisher.address, 1, (SENDER, "the engine"))
        self.pipe.send(("join", link))
        self.publisher.connect(link, TIMEOUT)
        self.answer()
        self.raw_group = RawGroup(rank=0)
        self.pipe.send(("raw group", self.raw_group.port))
        self.raw_group.open()
        self.answer()

    def answer(self) -> Any:
        if not self.pipe.poll(TIMEOUT):
            raise TimeoutError(f"the receiver did not answer within {TIMEOUT:.0f} s")
        return self.pipe.recv()

    def raw(self, repetition: int) -> Transfer:
        """All bytes in one buffer, one call."""
        self.pipe.send(("raw", self.nbytes))
        seconds = self.raw_group.broadcast(empty(self.nbytes))
        self.answer()
        return Transfer(seconds, 0, 0)

    def publish(self, repetition: int, *, manifest: bool) -> Transfer:
        """A publication as in training; without ``manifest`` neither side adds anything up."""
        self.version += 1
        self.pipe.send(("receive", (self.version, manifest)))
        with PeakMemory() as memory, adding_up(sending, manifest):
            report = self.publisher.publish(self.metas, self.tensors.items(), self.version, TIMEOUT)
        received: Received = self.answer()
        return Transfer(
            max(report.seconds, received.seconds), memory.extra_bytes, received.extra_bytes, received.seconds
        )

    def close(self) -> None:
        self.pipe.send(("end", None))
        self.process.join(60)


def measure(engine: EngineKind, folder: Path, repetitions: int, bucket_bytes: int) -> EngineOutcome:
    """Raw, without and with manifest, in turn, after one round that is not counted."""
    bench = Bench(engine, folder, bucket_bytes)
    sides: dict[str, Callable[[int], Transfer]] = {
        "raw": bench.raw,
        "without manifest": lambda repetition: bench.publish(repetition, manifest=False),
        "with manifest": lambda repetition: bench.publish(repetition, manifest=True),
    }
    for run in sides.values():
        run(0)
    transfers = interleaved(sides, repetitions)
    bench.close()
    raw, bare, whole = ([transfer.seconds for transfer in transfers[name]] for name in sides)
    published = transfers["without manifest"] + transfers["with manifest"]
    return EngineOutcome(
        engine=engine,
        nbytes=bench.nbytes,
        bucket_bytes=bucket_bytes,
        raw_seconds=MeasuredSpread.of(raw),
        seconds_without_manifest=MeasuredSpread.of(bare),
        seconds_with_manifest=MeasuredSpread.of(whole),
        share_of_raw=MeasuredSpread.of(ratios(raw, bare)),
        share_of_raw_with_manifest=MeasuredSpread.of(ratios(raw, whole)),
        pause_seconds=MeasuredSpread.of([transfer.pause_seconds for transfer in transfers["with manifest"]]),
        sender_extra_bytes=max(transfer.sender_extra_bytes for transfer in published),
        receiver_extra_bytes=max(transfer.receiver_extra_bytes for transfer in published),
    )


def show(outcomes: Sequence[EngineOutcome]) -> str:
    rows = [
        [o.engine, o.raw_seconds.show(), o.seconds_without_manifest.show(), o.seconds_with_manifest.show(),
         o.pause_seconds.show(), f"**{o.share_of_raw.show()}**", o.share_of_raw_with_manifest.show(),
         f"{o.sender_extra_bytes / 2**20:.0f}", f"{o.receiver_extra_bytes / 2**20:.0f}"]
        for o in outcomes
    ]  # fmt: skip
    header = ["engine", "raw s", "publication s", "with manifest s", "engine's pause s", "share of raw",
              "with manifest", "sender extra MiB", "engine extra MiB"]  # fmt: skip
    size, bucket = f"{outcomes[0].nbytes / 1e6:.0f} MB", f"{outcomes[0].bucket_bytes >> 20} MiB"
    what = f"{size} in buckets of {bucket}; median (smallest – largest)."
    return f"{what}\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the model is kept")
    parser.add_argument("--engines", choices=["torch", "vllm"], nargs="+", default=["torch", "vllm"])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--bucket-megabytes", type=int, default=256, help="as weights.bucketMegabytes")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = Hardware.here()
    folder = smollm2(arguments.cache)
    bucket_bytes = arguments.bucket_megabytes << 20
    outcomes = [measure(engine, folder, arguments.repetitions, bucket_bytes) for engine in arguments.engines]
    write_results(arguments.results, "publication", machine, outcomes, show(outcomes))


if __name__ == "__main__":
    main()

"""A learner's state into a bucket and back, against one file of the same size through the same client.

    .venv/bin/python -m benchmarks.buckets                    # with moto's server on this machine
    AWS_ENDPOINT_URL=... AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \
        .venv/bin/python -m benchmarks.buckets --bucket NAME --store "what it is"

Both sides use fsspec (s3fs), so what is left is what the sharded format costs: slices, metadata, small objects.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from uuid import uuid4

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from rljob_trainer.errors import BucketError
from rljob_trainer.learner.state_files import state_files
from rljob_trainer.storage.bucket import ObjectBucket

HERE = Path(__file__).parent
PORT = 5799
MATRICES, ROWS, COLUMNS = 60, 1500, 1500
MEGABYTES = MATRICES * ROWS * COLUMNS * 4 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", default="bucket", help="an existing bucket (default: one in a server of its own)")
    parser.add_argument("--store", default="moto's server on the same machine", help="what it is, for the results")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here()
    with own_server() if "AWS_ENDPOINT_URL" not in os.environ else nullcontext():
        seconds = measure(arguments.bucket, arguments.repetitions)
    write_results(arguments.results, "buckets", machine, {"store": arguments.store, "seconds": seconds},
                  show(arguments.store, seconds))  # fmt: skip


def measure(bucket: str, repetitions: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")  # torch says at each call that there is no process group
    state = {f"layer{number}": torch.randn(ROWS, COLUMNS) for number in range(MATRICES)}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    places = [ObjectBucket(f"s3://{bucket}/{uuid4().hex}") for _ in range(repetitions)]
    with tempfile.TemporaryDirectory() as folder:
        file, back = Path(folder, "file"), Path(folder, "back")
        file.write_bytes(b"".join(tensor.numpy().tobytes() for tensor in state.values()))

        def file_there(repetition: int) -> None:
            places[repetition].upload(file, "file")

        def state_there(repetition: int) -> None:
            save(state, storage_writer=state_files(f"{places[repetition]}/state").writer(), no_dist=True)

        def file_back(repetition: int) -> None:
            places[repetition].download("file", back)

        def state_back(repetition: int) -> None:
            load(target, storage_reader=state_files(f"{places[repetition]}/state").reader(), no_dist=True)

        sides = {"file written": file_there, "state written": state_there}
        seconds = interleaved({name: timed(side) for name, side in sides.items()}, repetitions)
        sides = {"file read": file_back, "state read": state_back}
        seconds |= interleaved({name: timed(side) for name, side in sides.items()}, repetitions)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    for place in places:
        place.remove(place.files())
    return seconds


def timed(side: Callable[[int], None]) -> Callable[[int], float]:
    def seconds(repetition: int) -> float:
        began = time.perf_counter()
        side(repetition)
        return time.perf_counter() - began

    return seconds


def show(store: str, seconds: dict[str, list[float]]) -> str:
    rows = [
        [name, MeasuredSpread.of(taken).show(), MeasuredSpread.of([MEGABYTES / each for each in taken]).show(".0f")]
        for name, taken in seconds.items()
    ]
    parts = []
    for verb in ("written", "read"):
        speed = MeasuredSpread.of(ratios(seconds[f"file {verb}"], seconds[f"state {verb}"]))
        parts.append(f"{verb} at {speed.show()} of the speed of one file")
    return f"{MEGABYTES:.0f} MB, one rank, {store}: {', '.join(parts)}.\n\n" + table(["", "seconds", "MB/s"], rows)


@contextmanager
def own_server() -> Iterator[None]:
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        import fsspec

        for _ in range(100):
            try:
                fsspec.filesystem("s3").mkdir("bucket")
                ObjectBucket("s3://bucket").files()
                break
            except (OSError, BucketError):
                time.sleep(0.2)
        yield
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()

"""Writes the model of a run as a Hugging Face folder, which transformers and vLLM load.

DIR is the output folder of `rljob run`, the address of a job's state (s3://...), or one of its checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_trainer.errors import OutputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place", metavar="DIR", help="output folder of a run or address of its state, or one of its checkpoints"
    )
    parser.add_argument("--to", metavar="OUT", type=Path, required=True, help="folder to be made")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)")


def run(args: argparse.Namespace) -> int:
    out: Path = args.to
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; give --to a new folder")
    if out.exists() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; give --to a new folder")
    export(args.place, args.step, out)
    return 0


def export(place: str, step: int | None, out: Path) -> None:
    """Raises ``CheckpointError`` when there is no such checkpoint or it is damaged."""
    import sys
    import tempfile

    from rljob_trainer.driver.finished import find_trained, load_actor

    with tempfile.TemporaryDirectory(prefix="rljob-export-") as scratch:
        found = find_trained(place, step, Path(scratch), report=lambda text: print(text, file=sys.stderr))
        load_actor(found).export(out)
    print(f"{out}: the model of step {found.checkpoint.step}")

"""Writes the model of a run as a Hugging Face folder, which transformers and vLLM load.

DIR is the output folder of `rljob run`, or one of its checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_trainer.errors import OutputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="output folder of a run, or one of its checkpoints")
    parser.add_argument("--to", metavar="OUT", type=Path, required=True, help="folder to be made")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)")


def run(args: argparse.Namespace) -> int:
    out: Path = args.to
    if out.exists() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; give --to a new folder")
    export(args.folder, args.step, out)
    return 0


def export(folder: Path, step: int | None, out: Path) -> None:
    """Raises ``CheckpointError`` when there is no such checkpoint or it is damaged."""
    import sys

    from rljob_trainer.driver.finished import find_checkpoint, load_actor

    found = find_checkpoint(folder, step, report=lambda text: print(text, file=sys.stderr))
    actor = load_actor(found)
    actor.export(out)
    print(f"{out}: the model of step {found.checkpoint.step}")

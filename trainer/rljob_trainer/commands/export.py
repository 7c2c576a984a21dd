"""Writes a run's model as a Hugging Face folder that transformers and vLLM can load.

The adapter of a job with model.lora is merged into the model; with --adapter it is written separately, in peft's
format. DIR is the output folder of `rljob run`, the address of a job's state (s3://...), or one of its checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rljob_trainer.errors import OutputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place", metavar="DIR", help="output folder of a run, address of its state, or one of its checkpoints"
    )
    parser.add_argument("--to", metavar="OUT", type=Path, required=True, help="folder to create")
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapter, as a folder that peft loads (model.lora)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)")


def run(args: argparse.Namespace) -> int:
    out: Path = args.to
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; pass a new folder with --to")
    if out.exists() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; pass a new folder with --to")
    export(args.place, args.step, out, adapter=args.adapter)
    return 0


def export(place: str, step: int | None, out: Path, *, adapter: bool = False) -> None:
    """Raises ``CheckpointError`` when there is no such checkpoint or it is damaged, ``OutputError`` when an ``adapter``
    is asked for and the run trained none."""
    import sys
    import tempfile

    from rljob_trainer.driver.finished import find_trained, load_actor

    with tempfile.TemporaryDirectory(prefix="rljob-export-") as scratch:
        found = find_trained(place, step, Path(scratch), report=lambda text: print(text, file=sys.stderr))
        if adapter and found.lora is None:
            raise OutputError(
                f"the run at {place} trained the whole model (its job has no spec.model.lora), so there is no adapter; "
                "remove --adapter"
            )
        print(f"step {found.checkpoint.step} of {place}; loading PyTorch", file=sys.stderr, flush=True)
        actor = load_actor(found)
        if adapter:
            actor.export_adapter(out, found.source or str(found.model.resolve()))
        else:
            actor.export(out)
    print(f"{out}: the {'adapter' if adapter else 'model'} of step {found.checkpoint.step}")

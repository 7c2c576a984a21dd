"""Trains a job on the Ray cluster that this process was submitted to. The operator starts it on the head pod.

The job file is the one that the operator mounts; its pvc:// locations are under /mnt/rljob. State is kept in
<checkpoint.uri>/<namespace>/<name>-<uid>, where the next attempt resumes. Exits with 75 when suspended.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO, cast

from rljob_api import JobInvalid, cluster
from rljob_api.status import DRIVER_PORT

FAREWELL_SECONDS = 15.0
"""The operator looks every 5 s; on a busy machine later."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="job file, as the operator mounts it")
    parser.add_argument("--attempt", type=int, required=True, metavar="N", help="number of this attempt, starting at 1")
    parser.add_argument(
        "--generation",
        type=int,
        required=True,
        metavar="G",
        help="minimum generation of the job file",
    )
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="token of the HTTP interface")
    parser.add_argument("--mirror-log", type=Path, metavar="PATH", help="also write log lines to this file")
    parser.add_argument("--host", default="0.0.0.0", help="address to serve on (default: all)")
    parser.add_argument("--port", type=int, default=DRIVER_PORT, help=f"port to serve on (default: {DRIVER_PORT})")
    parser.add_argument(
        "--storage",
        type=Path,
        default=Path(cluster.STORAGE_FOLDER),
        metavar="DIR",
        help=f"folder where claims are mounted (default: {cluster.STORAGE_FOLDER})",
    )


def run(args: argparse.Namespace) -> int:
    import sys

    from rljob_trainer.telemetry.mirror import mirrored

    with mirrored(sys.stdout, args.mirror_log) as stream:
        stream.write(f"attempt {args.attempt}: loading PyTorch and Ray\n")  # which takes seconds
        stream.flush()
        import asyncio

        from rljob_trainer.commands.mounted_job import mounted_job, options_of
        from rljob_trainer.control.http import Listening, read_token
        from rljob_trainer.driver.run import run_job
        from rljob_trainer.errors import RLJobError
        from rljob_trainer.secret_values import know, masked
        from rljob_trainer.telemetry.logs import logs_shown
        from rljob_trainer.telemetry.plain import PlainView

        try:
            listening = Listening(args.port, args.host, read_token(args.token_file), farewell=FAREWELL_SECONDS)
            job = mounted_job(args.file, args.generation, args.storage)
            know([job.spec.head.pod])
            options = options_of(job, args, listening)
            stream.also(options.output / "logs" / f"attempt-{args.attempt}.log")
            with PlainView(cast(TextIO, stream)) as view, logs_shown(view, job.spec.logging.level):
                ending = asyncio.run(run_job(job, options, view))
            if ending.exit_code == 0:
                # Exit code 0 alone says little: any code in this process could end it so.
                stream.write(masked(f"{cluster.DRIVE_FINISHED}{ending.reason}\n"))
                stream.flush()
            return ending.exit_code
        except (RLJobError, JobInvalid) as error:
            # The command line says it on standard error, which a Ray job keeps to itself.
            stream.only_mirror(masked(f"{cluster.DRIVE_SAYS}{error}\n"))
            raise

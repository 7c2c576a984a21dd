"""How the driver is started on the head: its command line and environment. Neither holds a secret."""

from __future__ import annotations

import shlex

from rljob_operator import names
from rljob_operator.observed import JobView

HEAD_LOG = "/proc/1/fd/1"
"""Standard output of the head container, which `kubectl logs` shows. A Ray job's own output isn't shown there."""


def driver_command(attempt: int, generation: int) -> str:
    """The Ray job's entrypoint. Numbers only: nothing of the job file gets near a shell."""
    command = [
        "rljob",
        "drive",
        f"{names.JOB_FOLDER}/{names.JOB_FILE}",
        "--attempt",
        str(attempt),
        "--generation",
        str(generation),
        "--token-file",
        f"{names.TOKEN_FOLDER}/{names.DRIVER_TOKEN_KEY}",
        "--mirror-log",
        HEAD_LOG,
    ]
    return shlex.join(command)


def driver_environment(job: JobView, attempt: int, incarnation: int) -> dict[str, str]:
    """The driver's environment variables, as Ray's runtime_env takes them."""
    return {
        "RLJOB_NAMESPACE": job.namespace,
        "RLJOB_NAME": job.name,
        "RLJOB_UID": job.uid,
        "RLJOB_ATTEMPT": str(attempt),
        "RLJOB_INCARNATION": str(incarnation),
    }

"""The sandbox that a job asks for: on this machine, as well contained as that can, or at a service."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.keeper.protocol import Mode, SandboxLimits
from rljob_trainer.world.sandbox.launch import Prepared
from rljob_trainer.world.sandbox.programs import LocalSandbox, mode_available
from rljob_trainer.world.sandbox.protocol import Sandbox
from rljob_trainer.world.sandbox.service import SandboxService

if TYPE_CHECKING:
    from rljob_api.spec.environment import SandboxSpec
    from rljob_trainer.waits import Waits

_WORKERS = 2


async def chosen_sandbox(
    wanted: SandboxSpec | None,
    field: str,
    seconds: float,
    output_bytes: int | None = None,
    prepared: Prepared | None = None,
    waits: Waits | None = None,
) -> Sandbox:
    """``field`` is where the job asks for it; ``seconds`` and ``output_bytes`` (None: as many as usual) are a program's
    limits, ``prepared`` what it finds imported; in ``waits`` a service is named that is waited for.

    Raises ``JobFileError`` for an isolation that does not work on this machine.
    """
    from rljob_api.spec.environment import SandboxSpec

    wanted = wanted or SandboxSpec()
    limits = SandboxLimits(
        wall_seconds=seconds,
        cpu_seconds=seconds,
        memory_bytes=wanted.memory_megabytes * 2**20,
        processes=wanted.processes,
    )
    if output_bytes is not None:
        limits = replace(limits, output_bytes=output_bytes)
    if wanted.url is not None:
        assert prepared is None, "the job's rules let no service import anything beforehand"
        return SandboxService(wanted.url, field, limits, wanted.workers, float(wanted.deadline_seconds), waits)
    mode = await asyncio.to_thread(_mode, wanted.isolation, field)
    return LocalSandbox(mode, limits, wanted.workers or _WORKERS, prepared)


def _mode(isolation: str, field: str) -> Mode:
    if isolation == "none":
        return "none"
    tried: tuple[Mode, ...] = ("namespaces", "landlock")
    wrong = []
    for mode in tried:
        if isolation in ("auto", mode):
            try:
                problem = mode_available(mode)
            except (OSError, WorldError) as error:
                problem = str(error)
            if problem is None:
                return mode
            wrong.append(f"{mode}: {problem}")
    raise JobFileError(
        f"{field}.isolation: programs that the model writes cannot be contained on this machine "
        f"({'; '.join(wrong)}). Run where one of the modes works (docs/sandbox.md), or set isolation: none to give "
        "programs the rights of this job"
    )

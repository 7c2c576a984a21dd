"""The sandbox that a job asks for, as well contained as the machine can."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.keeper.protocol import Mode, SandboxLimits
from rljob_trainer.world.sandbox.programs import Sandbox, mode_available

if TYPE_CHECKING:
    from rljob_api.spec.environment import SandboxSpec


async def chosen_sandbox(
    wanted: SandboxSpec | None, field: str, seconds: float, output_bytes: int | None = None
) -> Sandbox:
    """``field`` is where the job asks for it; ``seconds`` and ``output_bytes`` (None: as many as usual) are a program's
    limits.

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
    return Sandbox(await asyncio.to_thread(_mode, wanted.isolation, field), limits, wanted.workers)


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
        f"({'; '.join(wrong)}). Run where one of the modes works (docs/sandbox.md), or write isolation: none if they "
        "may do what this job may"
    )

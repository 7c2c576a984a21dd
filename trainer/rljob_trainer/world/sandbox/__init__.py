"""A sandbox for programs that models write: fresh Python programs, on this machine or at a service.

``Sandbox`` is what episodes use (``protocol.py``). ``LocalSandbox`` (``programs.py``) has two modes of containment and
one of none: each of its workers (``worker.py``, started by ``launch.py``) is a process inside the sandbox, the keeper
(``keeper/``), that forks for each program; what holds it and its programs is ``keeper/confinement.py``.
``SandboxService`` (``service.py``) asks a service with SandboxFusion's interface. ``chosen.py`` makes the one that a
job asks for. The page for users, with what each mode does not promise, is docs/sandbox.md."""

from rljob_trainer.world.sandbox.keeper.protocol import Mode, Outcome, SandboxLimits
from rljob_trainer.world.sandbox.launch import Prepared
from rljob_trainer.world.sandbox.programs import LocalSandbox, mode_available
from rljob_trainer.world.sandbox.protocol import ProgramResult, Sandbox

__all__ = [
    "LocalSandbox",
    "Mode",
    "Outcome",
    "Prepared",
    "ProgramResult",
    "Sandbox",
    "SandboxLimits",
    "mode_available",
]

"""A sandbox for programs that models write: fresh Python programs, in two modes of containment and one of none.

``Sandbox`` is what episodes use (``programs.py``). Each of its workers (``worker.py``, started by ``launch.py``) is a
process inside the sandbox, the keeper (``keeper/``), that forks for each program. What holds it and its programs is
``keeper/confinement.py``. The page for users, with what each mode does not promise, is docs/sandbox.md."""

from rljob_trainer.world.sandbox.keeper.protocol import Mode, Outcome, SandboxLimits
from rljob_trainer.world.sandbox.programs import ProgramResult, Sandbox, mode_available

__all__ = ["Mode", "Outcome", "ProgramResult", "Sandbox", "SandboxLimits", "mode_available"]

"""The last lines of a CI, below all tables: which stages failed and with what, and which tests are unsteady."""

from __future__ import annotations

import sys
from pathlib import Path

import again

LATE = (124, 137)
"""What `timeout` ends with: a stage that had no more time has not failed."""


def lines(folder: Path) -> list[str]:
    """``folder``: what CI's stages have written (``RLJOB_TEST_TIMES``)."""
    stages = [line.split() for line in (folder / "stages").read_text().splitlines()]
    failed = [name for name, *_, code in stages if int(code) not in (0, *LATE)]
    said = [f"FAILED stage {name}: {error((folder / f'{name}.log').read_text())}" for name in failed]
    for each in again.read(folder / "again"):
        seed = f", seed {each.seed}" if each.seed else ""
        alone = f"load {each.load:.1f}{seed}; passed {again.TIMES} times alone"
        said.append(f"UNSTEADY {each.test}: {each.error} ({alone})")
    return said


def error(log: str) -> str:
    """Of a failed stage: what its first failed test raised, else what make was told last."""
    in_tests = again.first_line(log) if "\nE " in log else ""
    others = [line for line in log.splitlines() if line.strip() and not line.startswith("make")]
    return in_tests or (others[-1].strip() if others else "it printed nothing")


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))

"""What episodes and rewards see of a sandbox, wherever its programs run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from rljob_trainer.world.sandbox.keeper.protocol import MOST_FILES, MOST_PAYLOAD_BYTES, Outcome, SandboxLimits, encoded

NO_FILES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a program did. It is the program's own doing, whatever it is: where the sandbox fails there is none."""

    outcome: Outcome
    exit_code: int
    """Negative: the number of the signal that ended it."""
    stdout: str
    """What is no UTF-8 is replaced."""
    stderr: str
    seconds: float
    truncated: bool
    """It wrote more than the limit; what is here is the beginning."""

    @property
    def succeeded(self) -> bool:
        return self.outcome == "exited" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs programs, each a fresh one with an empty folder. To be entered (`async with`) and used from one event loop.

    Entering it raises ``WorldError`` where no program can run.
    """

    @property
    def not_contained(self) -> tuple[str, ...]:
        """What programs can do here although the sandbox is to keep them from it, in words. Once it is entered."""
        ...

    @property
    def told(self) -> str:
        """What a model that writes programs is told of them, in a sentence; it may be empty."""
        ...

    async def run(self, source: str, stdin: str = "", files: Mapping[str, str] = NO_FILES) -> ProgramResult:
        """Runs ``source`` as a program of Python in an empty folder with ``files`` (paths below it, texts).

        Raises ``WorldError`` when the sandbox itself has failed, which says nothing of the program. Raises
        ``ValueError`` for what it does not take: files that are not in the folder, too many, or too large.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_program(source: str, stdin: str, files: Mapping[str, str], limits: SandboxLimits) -> None:
    """Raises ``ValueError`` for files outside the program's folder, or more than half of what there may be."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"{name!r} is not a path below the program's folder")
    size = sum(len(encoded(text)) for text in (source, stdin, *files.values()))
    most = min(limits.file_bytes // 2, MOST_PAYLOAD_BYTES // 6)
    if size > most or len(files) > MOST_FILES // 2:
        raise ValueError(
            f"source, stdin and {len(files)} files of {size} bytes together exceed the sandbox's limits "
            f"({most} bytes, {MOST_FILES // 2} files)"
        )


def outcome_of(exit_code: int, stderr: str) -> Outcome:
    """How a program ended that met no limit which was looked at."""
    if exit_code < 0:
        return "killed"
    if exit_code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        # The kernel refused it, and the program had no answer to that.
        return "out of memory"
    return "exited"

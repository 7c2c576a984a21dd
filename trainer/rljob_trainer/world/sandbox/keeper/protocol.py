"""What driver and keeper say to each other over one socket. Standard library only: half of it runs inside the sandbox.

The driver asks for a program with the length of its payload (four bytes) and the payload (JSON: source, stdin,
files), which the keeper hands on unread. While the program runs, one more byte means that it is to be killed. The
keeper says frames: a kind, a length, and so many bytes: once that it is ready, then one for each program, with an
``ProgramEnd`` ahead of what the program wrote, or one that says how it failed itself."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

Mode = Literal["namespaces", "landlock", "none"]

Outcome = Literal[
    "exited",
    "killed",
    "timed out",
    "out of memory",
    "too much output",
    "too many processes",
    "too many files",
    "cancelled",
]
"""How a program ended: by itself, with an exit code; by a signal that was not the sandbox's; by one of the limits; or
because whoever had asked for it no longer wanted it."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

HEADER = struct.Struct("!cI")
"""Of a frame: its kind, and how many bytes follow."""
REQUEST = struct.Struct("!I")
READY, ENDED, FAILED = b"r", b"e", b"f"
CANCEL = b"c"
STARTED = b"s"
"""What a program's process says to the keeper when it begins to be one."""

PREPARED = "rljob_prepared"
"""The name of the module that a keeper imports for its programs."""
MOST_PAYLOAD_BYTES = 256 * 2**20


def encoded(text: str) -> bytes:
    """A program's text as bytes. Surrogates are the bytes that they escape, as in Python's own names of files; where
    they are not, as in what a model can write into JSON, they are encoded as if they were characters."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use, with all the processes that it starts."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    """Of each process, rounded up to a second."""
    memory_bytes: int = 512 * 2**20
    """Of all processes together, looked at a hundred times a second; one that asks for a gibibyte more at once gets a
    ``MemoryError``."""
    processes: int = 32
    """Processes and threads together."""
    output_bytes: int = 64 * 2**10
    """Of each of stdout and stderr; a program that writes more is killed."""
    file_bytes: int = 64 * 2**20
    """Of all files together, in at most 1,024 files and folders."""

    def __post_init__(self) -> None:
        if self.wall_seconds <= 0 or self.cpu_seconds <= 0:
            raise ValueError("a program needs more than 0 seconds")
        if self.memory_bytes < 32 * 2**20:
            raise ValueError(f"Python itself needs 32 MiB of memory; memory_bytes is {self.memory_bytes}")
        if self.processes < 1 or self.output_bytes < 0 or self.file_bytes < 2**20:
            raise ValueError("a program needs a process, 1 MiB for files, and an output limit of at least 0")


MOST_FILES = 1024
"""Files and folders that a program may leave in its folder."""


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What a keeper is started with, as the last argument of its command line."""

    mode: Mode
    folder: str
    """The program's own. It is emptied after each; in ``namespaces`` it is a mount of each program's own."""
    readable: tuple[str, ...]
    """Files and folders of Python, of which programs may be executed."""
    devices: tuple[str, ...]
    own_user: bool
    """The worker has a user of its own."""
    landlock_abi: int
    """Which version of Landlock to ask for; 0: none."""
    limits: SandboxLimits
    packages: tuple[str, ...] = ()
    """Folders of packages that programs may import from."""
    prepares: bool = False
    """The keeper's package has ``PREPARED``, a module that every program finds imported."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        document: dict[str, Any] = json.loads(text)
        document["readable"] = tuple(document["readable"])
        document["devices"] = tuple(document["devices"])
        document["packages"] = tuple(document["packages"])
        document["limits"] = SandboxLimits(**document["limits"])
        return cls(**document)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended, and how much it had written."""

    outcome: Outcome
    exit_code: int
    """Negative: the number of the signal that ended it."""
    seconds: float
    """From its start until its last process was gone."""
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool

    LAYOUT = struct.Struct("!BidII?")

    def pack(self) -> bytes:
        outcome = OUTCOMES.index(self.outcome)
        counts = (self.stdout_bytes, self.stderr_bytes, self.truncated)
        return self.LAYOUT.pack(outcome, self.exit_code, self.seconds, *counts)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ``struct.error`` and ``IndexError`` for what no keeper says."""
        outcome, exit_code, seconds, stdout, stderr, truncated = cls.LAYOUT.unpack(packed)
        return cls(OUTCOMES[outcome], exit_code, seconds, stdout, stderr, truncated)

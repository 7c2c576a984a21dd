"""What the driver and a reward worker say to each other, and how it travels: a length, then a pickle."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from rljob_trainer.rewards.terms import Outcome, Response, TermSpec

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Setup:
    """The first frame to a worker, which answers with ``Ready``. Each later one is a list of ``Request``."""

    terms: tuple[TermSpec, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The functions are loaded, or why they are not."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to be scored by all terms that apply to its source, but for those named in ``skip``."""

    response: Response
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Calling:
    """This term's function is called for a sample now; sent only where several could be the one that hangs."""

    index: int
    term: str


@dataclass(frozen=True, slots=True)
class Scored:
    """Outcome of the sample at ``index`` of its list. Not ``final``: its async functions are still under way."""

    index: int
    outcome: Outcome
    final: bool = True


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes of the body behind a header of ``HEADER_BYTES``."""
    return int(_HEADER.unpack(header)[0])

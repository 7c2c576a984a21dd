"""Where a job says that something is, and errors of other parts as violations at a path of the job file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api import Violation
from rljob_api.problems import did_you_mean
from rljob_trainer.errors import RLJobError

HUB = "hf"
_OFTEN = ("file", "pvc", "s3", "gs", "gcs", "az", "abfs", "http", "https", "memory")


def as_violation(error: RLJobError, path: str) -> Violation:
    """An error's message, which says what and what to do, as a violation at ``path``."""
    text = str(error).removeprefix(f"{path}: ")
    problem, separator, remedy = text.rpartition("; ")
    return Violation(path, problem, remedy) if separator else Violation(path, text, "correct it, or use another one")


def local_path(location: str, base: Path) -> Path | None:
    """The path of a location on this machine; None for an address elsewhere."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return None if "://" in location else base / Path(location).expanduser()


def unknown_scheme(path: str, location: str | None, *others: str) -> Iterator[Violation]:
    """A violation for an address that begins with something that nobody reads. ``others`` count here, besides."""
    scheme, separator, _ = (location or "").partition("://")
    if not separator or scheme in (*_OFTEN, *others):
        return
    known: Sequence[str] = _known()
    if scheme in known and scheme != HUB:
        return
    close = did_you_mean(scheme, [*_OFTEN, *others])
    listed = ", ".join(f"{name}://" for name in ("s3", "pvc", "file", *others))
    yield Violation(
        path,
        f"{scheme}:// is not a known scheme",
        f"did you mean {close}://?" if close else f"use {listed}, another scheme of fsspec, or a path",
    )


def _known() -> Sequence[str]:
    # Only for rare schemes: the import takes a quarter of a second.
    import fsspec

    known: Sequence[str] = fsspec.available_protocols()
    return known

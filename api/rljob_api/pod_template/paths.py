"""Paths that must stay below something: of a volume, of a file in it."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.violations import Violation

LEAVES = r"^/|(^|/)\.\.(/|$)"
"""A regular expression that finds paths which don't stay below where they start."""


def descending(path: str, text: str) -> Iterator[Violation]:
    """validateLocalDescendingPath: relative, without `..`."""
    if text.startswith("/"):
        yield Violation(path, f'"{text}" begins with /', "write it relative to the volume's root")
    yield from without_backsteps(path, text)


def without_backsteps(path: str, text: str) -> Iterator[Violation]:
    """validatePathNoBacksteps."""
    if ".." in text.split("/"):
        yield Violation(path, f'"{text}" contains ..', "write the path without ..")


def file_name(path: str, text: str) -> Iterator[Violation]:
    """ValidateLocalNonReservedPath: where a volume of files puts one of them."""
    yield from descending(path, text)
    if text.startswith("..") and text != ".." and not text.startswith("../"):
        yield Violation(path, f'"{text}" begins with ..', "Kubernetes reserves such names; use another")

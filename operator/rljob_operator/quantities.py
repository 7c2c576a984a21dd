"""Kubernetes quantities (500m, 16Gi) as numbers, as far as the operator must compute with them."""

from __future__ import annotations

from fractions import Fraction

from rljob_api.pod_template.quantities import parse

__all__ = ["parse", "share_in_mebibytes"]


def share_in_mebibytes(text: str, share: Fraction) -> str:
    """A share of an amount of memory, in whole Mi (at least 1)."""
    return f"{max(1, int(parse(text) * share / 1024**2))}Mi"

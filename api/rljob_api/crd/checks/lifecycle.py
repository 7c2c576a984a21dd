"""CEL for the rules about the name, checkpoints, validation, retries and deadlines."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd.checks.check import MODEL, ROOT, SPEC, TRAIN, VALIDATION, Check
from rljob_api.crd.expressions import one_of
from rljob_api.crd.structural import Path, text
from rljob_api.rules.lifecycle import STATE_PLACES
from rljob_api.rules.naming import RESERVED_NAMES


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    yield Check(
        "name_is_not_reserved",
        ROOT,
        f"!(self.metadata.name in {one_of(RESERVED_NAMES)})",
        "the name is reserved; choose another",
        ".metadata.name",
    )
    yield Check(
        "validation_has_data",
        SPEC,
        "!has(self.validation.every) || (has(self.data.validation) && size(self.data.validation) > 0)",
        "there is no data to validate on; add data.validation, or remove it",
        ".validation.every",
    )
    known = text(f"^{STATE_PLACES}")
    places: tuple[tuple[Path, str], ...] = (("spec", "checkpoint"), "uri"), (("spec", "restore"), "from")
    for at, field in places:
        value = f"self.{field}"
        yield Check(
            "locations_have_known_schemes",
            at,
            f"!has({value}) || !{value}.matches('^[A-Za-z][A-Za-z0-9+.-]*://') || {value}.matches({known})",
            "state can't be kept there; use pvc://claim/path, s3://bucket/path (3 to 63 of a-z 0-9 - .) or a folder",
            f".{field}",
        )
    sources = (
        *places,
        (MODEL, "source"),
        (TRAIN, "source"),
        ((*TRAIN, "parts", "[]"), "source"),
        (VALIDATION, "source"),
    )
    for at, field in sources:
        value = f"self.{field}"
        yield Check(
            "volume_locations_name_a_claim",
            at,
            f"!has({value}) || !{value}.startsWith('pvc://') || "
            f"({value}.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)') && !{value}.matches('(^|/)[.][.](/|$)'))",
            "is no place in a volume; write pvc://claim/path, without ..",
            f".{field}",
        )
    yield Check(
        "backoff_grows",
        ("spec", "retry"),
        "self.backoffSeconds <= self.maxBackoffSeconds",
        "is more than maxBackoffSeconds; lower it, or raise maxBackoffSeconds",
        ".backoffSeconds",
    )
    for field in ("startSeconds", "progressSeconds"):
        yield Check(
            "parts_of_the_run_fit_its_deadline",
            ("spec", "deadlines"),
            f"!has(self.runSeconds) || self.{field} <= self.runSeconds",
            "is more than runSeconds: it never counts; lower it",
            f".{field}",
        )

"""Whether a run that ends has left something of its own to be continued from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.driver.run_files import RunFiles
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.record.resuming import Start

OF_ANOTHER, OWN, LATER = ("elsewhere/step-00000009", "here/step-00000002", "here/step-00000004")


def checkpoint(place: str | None) -> Any:
    return None if place is None else SimpleNamespace(place=place)


@pytest.mark.parametrize(
    ("begun_from", "own", "last", "saved"),
    [
        (None, False, None, False),
        (None, False, OWN, True),
        (OWN, True, OWN, True),
        (OF_ANOTHER, False, OF_ANOTHER, False),
        (OF_ANOTHER, False, LATER, True),
    ],
)
def test_what_another_run_has_saved_is_not_its_own(
    tmp_path: Path, begun_from: str | None, own: bool, last: str | None, saved: bool
) -> None:
    nobody: Any = SimpleNamespace(place="here")
    start = Start(checkpoint(begun_from), own=own)
    record = RunFiles(nobody, OutputFolder(tmp_path), nobody, start, nobody, str)
    assert record.saved is (own and begun_from is not None)
    session: Any = SimpleNamespace(checkpoint=checkpoint(last))
    record.lives_in(session)
    assert record.saved is saved

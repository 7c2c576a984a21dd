"""What CI's last lines say of the Pythons that it has tried."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import pythons


@pytest.mark.parametrize(("passes", "code"), [(True, 0), (False, 1)])
def test_a_python_that_is_not_there_and_one_that_fails_are_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passes: bool, code: int
) -> None:
    here = platform.python_version()
    default = ".".join(here.split(".")[:2])
    monkeypatch.setattr(pythons, "interpreter", lambda version: Path(sys.executable) if version == "3.98" else None)
    monkeypatch.setattr(pythons, "check", lambda python, folder: pythons.Outcome(here, passes))
    monkeypatch.setenv("RLJOB_TEST_TIMES", str(tmp_path))
    assert pythons.main([default, "3.98", "3.99"]) == code
    lines = (tmp_path / "pythons").read_text().splitlines()
    assert lines == [
        f"Pythons: {here} (everything), {here} (reduced set)",
        *([] if passes else [f"FAILED ON PYTHON {here}"]),
        "NOT TESTED ON PYTHON 3.99: this machine has none that runs",
    ]
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines

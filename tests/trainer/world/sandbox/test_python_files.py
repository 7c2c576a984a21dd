"""A copy of an interpreter for the users of a sandbox's workers: what it takes along, and what it does not."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_trainer.world.sandbox import python_files
from rljob_trainer.world.sandbox.python_files import PythonFiles

OTHER = Path("/dev/shm")


def test_packages_go_along_and_more_than_a_sandbox_should_copy_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    (packages / "one").mkdir(parents=True)
    (packages / "one" / "module.py").write_text("x = 1\n" * 1000)
    python = replace(PythonFiles.here(), packages=(packages,))
    with tempfile.TemporaryDirectory(dir=OTHER) as name:
        if Path(name).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip(f"{OTHER} is where {tmp_path} is")
        copy = python.copied(Path(name, "python"))
        assert (copy.packages[0] / "one" / "module.py").read_text() == "x = 1\n" * 1000
        monkeypatch.setattr(python_files, "_MOST_COPIED_BYTES", 4096)
        with pytest.raises(OSError, match=r"site-packages exceed .* use an environment with only"):
            python.copied(Path(name, "again"))
        # Links take no room.
        python.copied(tmp_path / "beside")

"""Standard output that is closed, and a status that is cut off, are no reason for a traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_trainer import cli
from rljob_trainer.cli import main

STATUS = '{"generation": 1, "attempt": 1, "time": "2026-01-01T00:00:00Z", "pools": {"rollout": {"desired": 1, '


@pytest.mark.parametrize("text", [b"", STATUS.encode(), STATUS.encode() + b"\xff\xfe", b"[]", b"null"])
def test_half_a_status_is_a_sentence(tmp_path: Path, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_bytes(text)
    assert main(["status", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("rljob status: ")
    assert str(tmp_path / "status.json") in said
    assert said.count("\n") == 1
    assert "pydantic" not in said


def test_a_token_that_cannot_be_read_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "http://127.0.0.1:9", "--token-file", str(tmp_path / "none")]) == 1
    assert "cannot read the token from" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "| true", "<&- >&-"])
def test_nobody_has_to_read_what_is_printed(tmp_path: Path, closed: str) -> None:
    """The files that are opened next do not take the numbers of closed streams, and get nothing that was printed."""
    program = (
        "import sys; from rljob_trainer import cli; from rljob_trainer.telemetry.open_view import open_view\n"
        "from types import SimpleNamespace\n"
        "def run(args):\n"
        f"    with open({str(tmp_path / 'first')!r}, 'w') as file, open_view(plain=True) as view:\n"
        "        view.message('for the reader')\n"
        "        print('for the reader', flush=True)\n"
        "        file.write(str(file.fileno() > 2))\n"
        "    return 0\n"
        "cli._command = lambda verb: SimpleNamespace(__doc__='', add_arguments=lambda parser: None, run=run)\n"
        "sys.exit(cli.main(['verb']))\n"
    )
    (tmp_path / "program.py").write_text(program)
    errors = tmp_path / "errors"
    command = f"{sys.executable} {tmp_path / 'program.py'} 2>{errors} {closed}"
    subprocess.run(["sh", "-c", command], check=False, timeout=60)
    assert errors.read_text() == ""
    assert (tmp_path / "first").read_text() in ("True", "")


def test_a_full_standard_output_is_called_that() -> None:
    program = (
        "import sys; from types import SimpleNamespace; from rljob_trainer import cli\n"
        "cli._command = lambda verb: SimpleNamespace(\n"
        "    __doc__='', add_arguments=lambda parser: None, run=lambda args: print('for the reader'))\n"
        "sys.exit(cli.main(['verb']))\n"
    )
    command = [sys.executable, "-c", program]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    said = "rljob verb: cannot write to standard output (No space left on device); free space where it goes\n"
    assert (done.returncode, done.stderr) == (73, said)


def test_of_a_full_disk_the_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def statvfs(folder: str) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=0 if folder == "/dev/shm" else 9, f_files=0, f_favail=0)

    verb = SimpleNamespace(__doc__="", add_arguments=lambda _: None, run=run)
    monkeypatch.setattr(cli, "_command", lambda _: verb)
    monkeypatch.setattr(os, "statvfs", statvfs)
    assert cli.main(["verb"]) == 73
    assert capsys.readouterr().err == "rljob verb: [Errno 28] No space left on device; make room in /dev/shm\n"

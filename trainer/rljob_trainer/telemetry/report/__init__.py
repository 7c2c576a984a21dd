"""``report.html``: a run as one page that needs no network, made from the output folder alone.

    write_report(folder)                                    # the driver, at the end
    python -m rljob_trainer.telemetry.report FOLDER         # anybody, at any time

``record.py`` reads the folder, ``charts.py`` says which curves there are, ``page.py`` puts the page together.
"""

from __future__ import annotations

from pathlib import Path

from rljob_trainer.telemetry.report.page import page
from rljob_trainer.telemetry.report.record import read_run
from rljob_trainer.telemetry.run_folder import REPORT, write_whole

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` into the output folder of a run, whether it has ended or not.

    Raises ``DataError`` when there is no run in ``folder``, ``OutputError`` when the page cannot be written.
    """
    path = folder / REPORT
    write_whole(path, page(read_run(folder)))
    return path

"""Log records of the driver as messages of the view, so that they neither tear the live picture nor get lost."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rljob_trainer.telemetry.view import View
from rljob_trainer.texts import writable


class _ViewHandler(logging.Handler):
    def __init__(self, view: View, level: int) -> None:
        super().__init__(level)
        self._view = view
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._view.message(writable(prefix + self.format(record)))


def _writes_to_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


@contextmanager
def logs_shown(view: View, level: str = "info") -> Iterator[None]:
    """Shows the trainer's records from ``level`` (debug, info, warning, error) on, those of others from warning on.

    Handlers of the root logger that write to the terminal (``logging.basicConfig``) are put aside meanwhile.
    """
    ours, root = logging.getLogger("rljob_trainer"), logging.getLogger()
    handlers = [
        (ours, _ViewHandler(view, logging.getLevelNamesMapping()[level.upper()])),
        (root, _ViewHandler(view, logging.WARNING)),
    ]
    before = ours.level, ours.propagate
    aside = [handler for handler in root.handlers if _writes_to_terminal(handler)]
    for handler in aside:
        root.removeHandler(handler)
    ours.setLevel(handlers[0][1].level)
    ours.propagate = False
    for logger, shown in handlers:
        logger.addHandler(shown)
    try:
        yield
    finally:
        for logger, shown in handlers:
            logger.removeHandler(shown)
        for handler in aside:
            root.addHandler(handler)
        ours.setLevel(before[0])
        ours.propagate = before[1]

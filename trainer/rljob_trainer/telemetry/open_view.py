"""The choice between the live view and plain lines."""

from __future__ import annotations

import sys
from typing import TextIO, cast

from rich.console import Console

from rljob_trainer.telemetry.live import LiveView
from rljob_trainer.telemetry.plain import PlainView
from rljob_trainer.telemetry.steady import SteadyStream
from rljob_trainer.telemetry.view import View


def open_view(stream: TextIO | None = None, *, plain: bool | None = None) -> View:
    """The live view when ``stream`` (default: standard output) is a terminal that can move its cursor, else plain.

    ``plain`` True or False overrides the choice. A stream that cannot be written to any more stops nobody.
    """
    steady = cast(TextIO, SteadyStream(stream or sys.stdout))
    console = Console(file=steady)
    if plain is None:
        plain = not console.is_terminal or console.is_dumb_terminal
    return PlainView(steady) if plain else LiveView(console)

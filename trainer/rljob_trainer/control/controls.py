"""How a run is watched and steered: there before its parts are, and still there when they end."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.control.signals import StopRequest
from rljob_trainer.control.standing import RunStanding
from rljob_trainer.control.steering import Steering
from rljob_trainer.control.stop_conditions import RunEnd
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.view import View
from rljob_trainer.waits import Waits


@dataclass(frozen=True, slots=True)
class Controls:
    """``view`` is all views together, ``standing`` among them."""

    view: View
    standing: RunStanding
    steering: Steering
    stop: StopRequest
    end: RunEnd
    times: StageTimes
    waits: Waits

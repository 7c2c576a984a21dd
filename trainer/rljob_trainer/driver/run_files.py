"""What is known about a run, and the files that it leaves: status, summary, timeline and report."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rljob_trainer.control.controls import Controls
from rljob_trainer.driver.session import Session
from rljob_trainer.errors import RLJobError
from rljob_trainer.record.account import Account
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.record.place import State
from rljob_trainer.record.resuming import Start
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.report import write_report
from rljob_trainer.telemetry.summary import Outcome, Summary, ValidationHistory, describe_machine, package_versions

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob

_log = logging.getLogger(__name__)


class RunFiles:
    """What is known about the run, for the files it leaves: also when it fails half-way."""

    def __init__(
        self,
        job: ResolvedJob,
        output: OutputFolder,
        state: State,
        start: Start,
        controls: Controls,
        shown: Callable[[str], str],
    ) -> None:
        """``shown``: a place as users know it."""
        self._model = ""
        self._session: Session | None = None
        self._ledger: Ledger | None = None
        """Closed, perhaps; its account stays."""
        self._controls = controls
        self._job = job
        self._output = output
        self._place, self._shown = state.place, shown
        self._start = start
        self._began = datetime.datetime.now(datetime.UTC)

    @property
    def trains(self) -> bool:
        """Whether training has begun: until then there is nothing to save."""
        return self._session is not None and self._session.trains

    @property
    def saved(self) -> bool:
        """Whether the run has a checkpoint of its own, to be continued from."""
        begun_from, last = self._start.checkpoint, self._session.checkpoint if self._session is not None else None
        if self._start.own and begun_from is not None:
            return True
        return last is not None and (begun_from is None or last.place != begun_from.place)

    def reads(self, model: str) -> None:
        """``model``: what is trained, in words."""
        self._model = model

    def counted_by(self, ledger: Ledger) -> None:
        """From now on ``ledger`` says what became of the prompts; also when it is closed."""
        self._ledger = ledger

    def lives_in(self, session: Session) -> None:
        """The parts are there, and ``session`` is about to train."""
        self._session = session

    def begins_again(self, start: Start) -> int:
        """The run goes on from a checkpoint of its own; returns its step."""
        assert start.checkpoint is not None
        self._session, self._start = None, start
        return start.checkpoint.step

    def write(self, outcome: Outcome, reason: str) -> None:
        """Status, summary, timeline and report. A folder that cannot be written is logged: the run's own error matters
        more."""
        for write in (self._controls.standing.write, lambda: self._write(outcome, reason)):
            try:
                write()
            except RLJobError as error:
                _log.error("%s", error)

    def _write(self, outcome: Outcome, reason: str) -> None:
        folder, session = self._output.path, self._session
        ended = datetime.datetime.now(datetime.UTC)
        totals = None if session is None else session.totals
        checkpoint = self._start.checkpoint if session is None else session.checkpoint or self._start.checkpoint
        account = Account() if self._ledger is None else self._ledger.account
        trained, dropped = account.ended
        Summary(
            outcome=outcome,
            reason=reason,
            job=self._job.metadata.name,
            algorithm=self._job.spec.algorithm.preset,
            model=self._model,
            started_at=self._began,
            ended_at=ended,
            seconds=(ended - self._began).total_seconds(),
            resumed_from_step=None if self._start.checkpoint is None else self._start.checkpoint.step,
            steps=0 if totals is None else totals.step,
            total_steps=self._controls.end.total_steps,
            version=0 if totals is None else totals.version,
            samples=0 if totals is None else totals.samples,
            prompt_tokens=0 if totals is None else totals.tokens - totals.response_tokens,
            response_tokens=0 if totals is None else totals.response_tokens,
            ages=account.ages,
            trained=trained,
            dropped=dropped,
            overlong_prompts=0 if session is None else session.overlong_prompts,
            seconds_by_stage=self._controls.times.exclusive_totals,
            validation=ValidationHistory.read(folder).by_source(),
            checkpoint=None if checkpoint is None else self._shown(checkpoint.place),
            report=self._shown(f"{self._place}/{run_folder.REPORT}"),
            packages=package_versions(),
            machine=describe_machine(),
        ).write(folder)
        self._controls.times.trace.write(folder / run_folder.TIMELINE)
        write_report(folder)

"""Limits of the mismatch (``algorithm.rolloutCorrection.limits``): what a run does when engines and trainer disagree.

What is judged, after every step: the KL, the chi-square and the effective sample size of pi_trainer / pi_engine on the
tokens of that step. Where all of them were made under the trainer's present weights (mode sync) that is
``mismatch/kl``, ``mismatch/chi_square`` and ``mismatch/effective_sample_size``: any difference is an error. In the
other modes the same figures of all tokens, ``drift/...``: what the policy has learned since is in them, so their limits
must leave room for it. A step without figures (nothing was scored) is not judged. A figure that is no number is beyond
every limit. One step proves little, so the action waits for ``patience`` steps in a row:

- ``warn``: a sentence, at once and then every hundred steps for as long as it lasts.
- ``correct``: the next batch, and all that follow, are corrected: mode decoupled, with the weights of the job or token
  weights cut at 2. It stays on, also after a resume: the figures compare engine and trainer and do not say what the
  correction has made of it.
- ``rollBack``: what was learned since the first of these steps came from samples that nobody should learn from. While
  figures are beyond a limit no checkpoint is written, so the last one is the last good one. The driver takes
  learner and engines down, starts new ones and goes on from it: an engine that samples wrongly is suspect itself, and
  loading other weights into it would prove nothing. This happens in the same process, so `rljob run` needs nobody to
  call it again and the operator's retries are not used up. It is a resume like any other: the ledger is rolled back,
  and versions get numbers above all that were used. After ``rollBacks`` times, or without a checkpoint to go back to,
  the run fails (exit code 65: the same again would not help).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rljob_api.spec.algorithm import MismatchLimits
from rljob_trainer.checkpoints.checkpoint import Checkpoints, latest
from rljob_trainer.errors import RLJobError
from rljob_trainer.pipeline.parts import Apart
from rljob_trainer.record.resuming import Start

_REMINDER = 100
"""Steps between two sentences about a breach that lasts."""


class MismatchError(RLJobError):
    """Engines and trainer stay too far apart (exit code 65: retrying does not help)."""

    exit_code = 65


class RollBackError(RLJobError):
    """The run is to go on from its last checkpoint; never seen by a user, unless nobody catches it."""

    exit_code = 75


class MismatchWatch:
    """Judges each step. Inert without limits in the job."""

    def __init__(
        self,
        given: MismatchLimits | None,
        *,
        correct: Callable[[], None],
        report: Callable[[str], None],
        roll_backs: int = 0,
    ) -> None:
        """``correct`` switches the correction on. ``roll_backs``: how often this process has gone back already."""
        self._given = given
        self._correct, self._report = correct, report
        self._in_a_row = 0
        self._correcting = False
        self._roll_backs = roll_backs
        self.sentence = ""
        """What is wrong now; empty when nothing is."""

    @property
    def suspect(self) -> bool:
        """Whether the present weights may have to be given up, so that they are no checkpoint to go back to."""
        return self._given is not None and self._given.action == "rollBack" and self._in_a_row > 0

    def look(self, step: int, apart: Apart | None) -> dict[str, float]:
        """Judges a step, acts, and returns metrics of its own. Raises ``RollBackError``.

        ``apart``: how far trainer and engines are apart on its tokens; None: nothing was compared.
        """
        given = self._given
        if given is None:
            return {}
        if apart is not None:
            beyond = list(_beyond(given, apart))
            self._in_a_row = self._in_a_row + 1 if beyond else 0
            self.sentence = ", ".join(beyond) + f" ({self._in_a_row} steps in a row)" if beyond else ""
            if beyond:
                self._act(given, step, f" (worst: {apart.worst})" if apart.worst else "")
        return {
            "mismatch/beyond_limits": float(self._in_a_row),
            "mismatch/correcting": float(self._correcting),
            "mismatch/roll_backs": float(self._roll_backs),
        }

    def _act(self, given: MismatchLimits, step: int, worst: str) -> None:
        late = self._in_a_row - given.patience
        if late < 0:
            return
        said = f"step {step}: the log-probs of engines and trainer differ too much: {self.sentence}{worst}"
        if given.action == "rollBack":
            raise RollBackError(said)
        if given.action == "correct" and not self._correcting:
            self._correcting = True
            self._correct()
            self._report(f"{said}; importance weights will correct for it, starting with the next batch")
        elif late % _REMINDER == 0:
            self._report(f"{said}; {_REMEDY}")

    def resumed(self, *, correcting: bool) -> None:
        """Takes note of what an earlier process has switched on."""
        self._correcting = correcting


_REMEDY = "look for an engine with different settings or kernels, or correct for it (algorithm.rolloutCorrection)"


def _beyond(given: MismatchLimits, apart: Apart) -> Iterator[str]:
    """A few words for each figure that is beyond its limit."""
    for name, value, limit in (
        ("kl", apart.kl, given.kl),
        ("chi_square", apart.chi_square, given.chi_square),
    ):
        if limit is not None and not value <= limit:
            yield f"{apart.family}/{name} {_figure(value)} is above {limit:g}"
    size = apart.effective_sample_size
    if given.effective_sample_size is not None and not size >= given.effective_sample_size:
        yield f"{apart.family}/effective_sample_size {_figure(size)} is below {given.effective_sample_size:g}"


def _figure(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "(not finite)"


def start_again(
    beyond: RollBackError, times: int, limit: int, checkpoints: Checkpoints, report: Callable[[str], None]
) -> Start:
    """The last good checkpoint, for the ``times``-th time. Raises ``MismatchError`` when that is no way out."""
    if times > limit:
        raise MismatchError(f"{beyond}; rolling back {limit} times (limits.rollBacks) did not help; {_REMEDY}")
    good = latest(checkpoints, report)
    if good is None:
        raise MismatchError(
            f"{beyond}; there is no earlier checkpoint to roll back to (checkpoint.everySteps); {_REMEDY}"
        )
    report(f"{beyond}; rolling back to the checkpoint of step {good.step} with new engines ({times} of {limit} times)")
    return Start(good, own=True)

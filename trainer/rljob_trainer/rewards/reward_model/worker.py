"""A process that computes a reward model: ``python -m rljob_trainer.rewards.reward_model.worker``.

Talks pickled frames (``frames.py``) over its standard input and output: ``ServedModel``, answered by ``Ready``; then
lists of rows, each answered by a ``ScoredBatch``, or by a ``BatchProblem`` when the model raises. It ends when the
driver closes the pipe, or dies, and when nothing can be computed in it any more.
"""

from __future__ import annotations

import signal
import time

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.child import die_with_parent, take_over_pipes
from rljob_trainer.rewards.frames import Ready, frame, read_frame
from rljob_trainer.rewards.reward_model.replica import BatchProblem, ScoredBatch, ScorerLostError
from rljob_trainer.rewards.verdicts import described_error


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    incoming, outgoing = take_over_pipes()
    model = read_frame(incoming)
    if model is None:
        return
    from rljob_trainer.rewards.reward_model.scorer import Scorer, settings_of

    try:
        scorer = Scorer(settings_of(model, "cpu"))
    except JobFileError as problem:
        outgoing.write(frame(Ready(str(problem))))
        outgoing.flush()
        return
    outgoing.write(frame(Ready()))
    outgoing.flush()
    while (rows := read_frame(incoming)) is not None:
        began = time.monotonic()
        try:
            scores, tokens = scorer.scores(rows)
        except ScorerLostError:
            raise  # another process is asked
        except Exception as problem:  # noqa: BLE001  the model's code may raise anything, and the next rows may do
            answer: ScoredBatch | BatchProblem = BatchProblem(described_error(problem))
        else:
            answer = ScoredBatch(scores, tokens, time.monotonic() - began)
        outgoing.write(frame(answer))
        outgoing.flush()


if __name__ == "__main__":
    main()

"""``trainer.deterministic``: do two learners that do the same work come to the same bits here, and at what cost?"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.learner import filled, new_rank
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.work import Share

UPDATES = 3


def measure(writer: Writer, device: str, cache: Path) -> None:
    model, share, micro_batch_tokens = filled(cache, device, sequences=128)
    found: dict[bool, list[str]] = {}
    seconds: dict[bool, float] = {}
    for deterministic in (False, True):
        found[deterministic] = []
        for _ in range(2):
            rank = new_rank(model, device, "bfloat16", micro_batch_tokens, reference=False, deterministic=deterministic)
            digest, seconds[deterministic] = _worked(rank, share)
            found[deterministic].append(digest)
            rank.close()
            del rank
    equal = {deterministic: float(len(set(digests)) == 1) for deterministic, digests in found.items()}
    writer.at_least("deterministic: two learners come to the same bits (1: yes)", equal[True], 1)
    writer.plain("not deterministic: two learners come to the same bits (1: yes)", equal[False])
    writer.plain("deterministic: seconds of an update over those without", seconds[True] / seconds[False])


def _worked(rank: LearnerRank, share: Share) -> tuple[str, float]:
    """A digest of the scores before, the weights after and the scores after some updates, and an update's seconds."""
    digest = hashlib.sha256()
    digest.update(_scores(rank, share))
    spent = []
    for _ in range(UPDATES):
        started = time.perf_counter()
        rank.update(share, LossSettings())
        spent.append(time.perf_counter() - started)
    for _, parameter in rank.actor.parameters():
        digest.update(rank.actor.layout.local(parameter).detach().float().cpu().numpy().tobytes())
    digest.update(_scores(rank, share))
    return digest.hexdigest(), median(spent)


def _scores(rank: LearnerRank, share: Share) -> bytes:
    scores: np.ndarray = rank.score(share, ScoreRequest(log_probs=True)).streams["log_probs"]
    return scores.tobytes()

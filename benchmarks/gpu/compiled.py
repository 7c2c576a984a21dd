"""The learner with ``trainer.compile`` and without: is the gradient the same, how fast is each, in how much memory?"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch._dynamo.utils

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.learner import filled, new_rank
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import Dtype
from rljob_trainer.learner.work import Share

ROUNDS = 3


def measure(writer: Writer, device: str, cache: Path) -> None:
    dtype: Dtype = "bfloat16" if device == "cuda" else "float32"
    model, share, micro_batch_tokens = filled(cache, device)
    gradients: dict[bool, dict[str, torch.Tensor]] = {}
    rates: dict[bool, float] = {}
    for compiled in (False, True):
        rank = new_rank(model, device, dtype, micro_batch_tokens, reference=False, compiled=compiled)
        name = "compiled" if compiled else "as it is"
        started = time.perf_counter()
        gradients[compiled] = _gradient(rank, share)
        if compiled:
            made = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            writer.plain("compile: programs for a gradient", made)
            writer.plain("compile: first gradient, with compilation", time.perf_counter() - started, "s")
        scores = rank.score(share, ScoreRequest(log_probs=True)).streams["log_probs"]
        reports = [rank.update(share, LossSettings()) for _ in range(ROUNDS)]
        spent = [report.usage for report in reports]
        # Other programs, without gradients and with.
        assert reports[0].first_log_probs is not None
        apart = float(np.abs(reports[0].first_log_probs - scores).max())
        writer.plain(f"compile: first pass against scores, {name}, largest difference", apart, "nats")
        if compiled:
            made = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            writer.plain("compile: programs for gradients and scores", made)
        rates[compiled] = float(share.lengths.prompts.sum() + share.lengths.responses.sum()) / median(
            usage.seconds["update_actor"] for usage in spent
        )
        writer.plain(f"compile: update, {name}", rates[compiled], "tokens/s")
        if device == "cuda":
            peak = max(usage.device_allocated for usage in spent)
            writer.plain(f"compile: device memory at its peak, {name}", peak / 1e9, "GB")
        rank.close()
        del rank
        if device == "cuda":
            torch.cuda.empty_cache()
    writer.plain("compile: update, compiled over as it is", rates[True] / rates[False])
    # bfloat16 rounds each of the operations that a program makes in float32.
    far = _far(gradients[True], gradients[False])
    writer.at_most("compile: gradient, relative difference", far, 0.03 if device == "cuda" else 1e-5)


def _gradient(rank: LearnerRank, share: Share) -> dict[str, torch.Tensor]:
    """Of one mini-batch, in host memory; nothing is left of it on the rank."""
    rank.gradient([rank.actor], share, 0, LossSettings())
    found = {}
    for name, parameter in rank.actor.parameters():
        assert parameter.grad is not None
        found[name] = rank.actor.layout.local(parameter.grad).float().cpu().clone()
    rank.actor.module.zero_grad()
    return found


def _far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters together."""
    squared = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return float((squared / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5)

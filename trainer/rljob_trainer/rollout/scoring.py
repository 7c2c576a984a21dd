"""Padded passes over whole sequences: how prompts are batched for prefill, and log-probs of given responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.rollout.decoder import Decoder

PASS_TOKENS = 8192
"""Padded tokens of one pass: bounds the activations."""
_HEAD_ROWS = 1024
"""Rows of logits held at once."""


def passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of ascending ``lengths`` whose padded size stays within the budget (or that hold one sequence)."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop - start + 1) * lengths[stop] > PASS_TOKENS:
            yield start, stop
            start = stop


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[n, longest]`` with zeros after each sequence; causal attention never looks at them."""
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for line, sequence in zip(ids, sequences, strict=True):
        line[: len(sequence)] = sequence
    return torch.from_numpy(ids).to(device)


def score(
    decoder: Decoder, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[FloatArray]:
    """Log-probs ``[T]`` of each response in ``(prompt_ids, response_ids)``; temperature 0 counts as 1."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]) + len(sequences[index][1]))
    whole = [(*sequences[index][0], *sequences[index][1]) for index in order]
    scores: dict[int, FloatArray] = {}
    for start, stop in passes([len(ids) for ids in whole]):
        ids = pad(whole[start:stop], decoder.device)
        # The last token predicts nothing.
        hidden = decoder.prefill(ids[:, :-1])
        for line, index in enumerate(order[start:stop]):
            prompt, response = sequences[index]
            span = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            scores[index] = _log_probs(decoder, hidden[line, span], ids[line, 1:][span], temperature or 1.0)
    return [scores[index] for index in range(len(sequences))]


def _log_probs(decoder: Decoder, hidden: Tensor, targets: Tensor, temperature: float) -> FloatArray:
    """Log-probs of ``targets [T]`` after ``hidden [T, hidden]``, a block of logits at a time."""
    parts = [np.empty(0, np.float32)]
    for rows, wanted in zip(torch.split(hidden, _HEAD_ROWS), torch.split(targets, _HEAD_ROWS), strict=True):
        logits = decoder.logits(rows).float() / temperature
        parts.append(logits.log_softmax(-1).gather(1, wanted[:, None]).view(-1).cpu().numpy())
    return np.concatenate(parts)

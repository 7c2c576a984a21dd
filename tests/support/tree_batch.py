"""Batches whose sequences have more in common than their prompts: whole turns, and histories that were edited."""

from __future__ import annotations

import numpy as np

from rljob_trainer.episodes.tokens import IntArray
from rljob_trainer.learner.protocol import SequenceBatch


def batch_of(
    sequences: list[tuple[IntArray, IntArray]], rng: np.random.Generator | None = None, *, unmasked: float = 0.8
) -> SequenceBatch:
    """Prompts with their responses, a mask with holes, and every stream, drawn from ``rng``."""
    rng = rng or np.random.default_rng(0)
    responses = np.array([len(response) for _, response in sequences])
    tokens = int(responses.sum())

    def stream(scale: float, shift: float = 0.0) -> np.ndarray:
        return (shift + scale * rng.standard_normal(tokens)).astype(np.float32)

    return SequenceBatch(
        token_ids=np.concatenate([part for sequence in sequences for part in sequence]).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt, _ in sequences]),
        response_lengths=responses,
        mask=rng.random(tokens) < unmasked,
        advantages=stream(1.0),
        returns=stream(1.0),
        values=stream(0.2),
        old_log_probs=stream(0.3, -3.9),
        rollout_log_probs=stream(0.3, -3.9),
        ref_log_probs=stream(0.3, -3.9),
        weights=np.abs(stream(0.2, 1.0)),
    )


def tree_batch(groups: int = 3, samples: int = 5, *, vocabulary: int = 50, seed: int = 0) -> SequenceBatch:
    """Each prompt's samples branch off one another behind some of their turns; one is there twice, one ends where
    another goes on, one has a prompt that ends inside another's turns, one has no response."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> IntArray:
        return rng.integers(0, vocabulary, length).astype(np.int32)

    sequences = []
    for _ in range(groups):
        prompt = text(int(rng.integers(3, 25)))
        responses = [text(int(rng.integers(40, 90)))]
        for _ in range(samples - 1):
            earlier = responses[rng.integers(len(responses))]
            kept = earlier[: rng.integers(16, len(earlier))]
            responses.append(np.concatenate([kept, text(int(rng.integers(1, 30)))]))
        sequences += [(prompt, response) for response in responses]
        sequences.append((prompt, responses[1]))
        sequences.append((prompt, responses[0][:30]))
        sequences.append((np.concatenate([prompt, responses[0][:25]]), text(9)))
        sequences.append((prompt, text(0)))
    order = rng.permutation(len(sequences))
    return batch_of([sequences[n] for n in order], rng)

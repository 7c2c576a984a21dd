"""The exact KL divergence over the vocabulary, without ever holding all logits.

Estimators from one sampled token are noisy; the exact sum costs a projection of the reference's hidden states more.
Tokens go through in chunks, each recomputed in the backward pass, so memory is one chunk of logits per policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Project = Callable[[Tensor], Tensor]
"""Hidden states ``[n, hidden]`` to logits ``[n, vocabulary]``."""
Divergence = Callable[[Tensor, Tensor, float], Tensor]
"""The policy's and the reference's logits ``[n, vocabulary]``, and a temperature, to ``[n]``."""


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """``[n]``: sum over the vocabulary of pi (log pi - log pi_ref), from logits ``[n, vocabulary]``.

    Reduced in float32 or wider. The policy's gradient flows; the reference's does not.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = torch.log_softmax(logits.to(wide) / temperature, dim=-1)
    reference = torch.log_softmax(ref_logits.detach().to(wide) / temperature, dim=-1)
    # A token that neither policy allows (both -inf) adds nothing.
    gap = torch.where(log_probs == -torch.inf, 0, log_probs - reference)
    return (log_probs.exp() * gap).sum(-1)


def chunked_kl(
    hidden: Tensor,
    project: Project,
    ref_hidden: Tensor,
    ref_project: Project,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    divergence: Divergence = exact_kl,
) -> Tensor:
    """``[tokens]``: `exact_kl` of hidden states ``[tokens, hidden]`` in chunks of ``chunk`` tokens.

    Gradients flow into ``hidden`` and whatever ``project`` closes over. ``divergence``: what is computed of a chunk,
    where projections give some words' logits only.
    """
    if chunk < 1:
        raise ValueError(f"a chunk holds at least one token, but chunk is {chunk}")

    def piece(states: Tensor, ref_states: Tensor) -> Tensor:
        with torch.no_grad():
            ref_logits = ref_project(ref_states)
        return divergence(project(states), ref_logits, temperature)

    pieces = [
        checkpoint(piece, states, ref_states, use_reentrant=False)
        for states, ref_states in zip(hidden.split(chunk), ref_hidden.split(chunk), strict=True)
    ]
    return torch.cat(pieces) if pieces else hidden.new_zeros(0)

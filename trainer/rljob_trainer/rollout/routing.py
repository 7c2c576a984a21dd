"""The experts that an engine's routers chose, put to the tokens that they belong to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rljob_trainer.episodes.requests import GenerationRequest
from rljob_trainer.episodes.tokens import ByteArray, Tokens
from rljob_trainer.errors import EngineError


def without_experts(tokens: Tokens) -> Tokens:
    """For an engine that tells none: a stream is known of all tokens or of none."""
    return tokens if tokens.routed_experts is None else replace(tokens, routed_experts=None, prompt_experts=None)


def with_experts(request: GenerationRequest, made: Tokens, computed: ByteArray) -> tuple[Tokens, Tokens]:
    """What the request brought along, and the tokens ``made``, each with the experts that were chosen in the pass that
    predicted it.

    ``computed [tokens, layers, k]`` are those of the tokens that the engine computed for the request, from the prompt's
    first one on. The last one made is not among them: nothing was predicted from it. Raises ``EngineError`` when some
    are missing.
    """
    first = len(request.prefix)
    needed = first + len(made) - 1
    if len(made) and len(computed) < needed:
        raise EngineError(
            f"the engine reports the experts of {len(computed)} tokens of {request.id}, but computed {needed}; "
            "please report this, and remove algorithm.routingReplay until it is fixed"
        )
    begun = request.begun
    if len(begun) and begun.routed_experts is None:
        # Sampled by an engine that told none: the choices of the pass that read them again stand in, if there was one.
        own = np.zeros((len(begun), *computed.shape[1:]), np.uint8)
        if len(read := computed[len(request.prompt_ids) - 1 :][: len(begun)]) == len(begun):
            own = read
        begun = replace(begun, routed_experts=own)
    made = replace(made, routed_experts=computed[first - 1 : needed])
    of_prompt = computed[: len(request.prompt_ids) - 1]
    if not len(begun):
        return begun, replace(made, prompt_experts=of_prompt)
    if begun.prompt_experts is None and len(of_prompt) == len(request.prompt_ids) - 1:
        begun = replace(begun, prompt_experts=of_prompt)
    return begun, made

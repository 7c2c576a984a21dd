"""The model that a job's critic starts from, if that is another than the policy: found and checked before any start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.models.building import check_builds
from rljob_trainer.models.critic_start import FIELD, check_fits, check_same_tokens, read_critic
from rljob_trainer.models.fixed import FixedModel, fixed_model
from rljob_trainer.models.tokenizer import load_tokenizer
from rljob_trainer.models.weights import check_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rljob_api.resolved import ResolvedSpec


def critic_of(
    spec: ResolvedSpec, base: Path, *, vocabulary: int, tokenizer: PreTrainedTokenizerBase
) -> FixedModel | None:
    """``base`` is where a relative path starts; ``vocabulary`` the rows of the policy's embedding, ``tokenizer`` its
    own. None: the critic starts as a copy of the policy, or there is none.

    Raises ``JobFileError`` for a model that cannot be this policy's critic.
    """
    critic = spec.algorithm.critic
    if critic is None or critic.model is None:
        return None
    found = fixed_model(FIELD, critic.model.source, critic.model.revision, base)
    folder = found.folder()
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    check_fits(read_critic(folder), spec.trainer.parallelism, vocabulary=vocabulary, longest=longest)
    check_builds(folder)
    check_same_tokens(load_tokenizer(folder), tokenizer)
    check_values(folder)
    return found

"""Whether a folder can be what a critic starts from, told by its configuration and the headers of its weights.

A critic reads the policy's token ids, so it needs a row for each of them, and they have to mean the same to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.config import TENSOR_FAMILIES, read_json
from rljob_trainer.models.folder import Shape, read_shape
from rljob_trainer.models.tokenizer_files import has_tokenizer
from rljob_trainer.models.weights import check_weights, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rljob_api.spec.pools import TrainerParallelism

FIELD = "spec.algorithm.critic.model.source"
HEAD = "score.weight"
"""What transformers' sequence classifications of the known families call their head's matrix [labels, d]."""
_LANGUAGE_MODEL, _CLASSIFICATION = "ForCausalLM", "ForSequenceClassification"


def has_head(folder: Path) -> bool:
    """Whether the folder is a sequence classification, whose head is kept. Raises ``JobFileError``."""
    return any(kind.endswith(_CLASSIFICATION) for kind in _kinds(read_json(folder / "config.json")))


def read_critic(folder: Path) -> Shape:
    """What the folder's configuration says of its model. Raises ``JobFileError`` naming the job's field and what is
    wrong: no decoder that the learner trains, several labels, weights that are not those of the configuration, or no
    tokenizer."""
    file = folder / "config.json"
    try:
        config = read_json(file)
        shape = read_shape(file)
        if shape.untrainable is not None:
            raise JobFileError(f"the learner {shape.untrainable}, see {file}; start the critic from another model")
        kinds = _kinds(config)
        scores = any(kind.endswith(_CLASSIFICATION) for kind in kinds)
        if kinds and not scores and not any(kind.endswith(_LANGUAGE_MODEL) for kind in kinds):
            raise JobFileError(
                f"{folder} is a {', '.join(kinds)}; use a language model, or a reward model (...{_CLASSIFICATION})"
            )
        if scores and (labels := _labels(config)) != 1:
            raise JobFileError(f"{folder} has num_labels {labels}; use a model with num_labels 1")
        stored = stored_tensors(folder)
        # A critic has no use for an output matrix: whether there is one is all the same.
        check_weights(config, file, {name: t for name, t in stored.items() if name != "lm_head.weight"}, tied=True)
        if scores and (HEAD not in stored or stored[HEAD].shape != (1, shape.hidden_size)):
            found = f"of the shape {list(stored[HEAD].shape)}" if HEAD in stored else "missing"
            raise JobFileError(
                f"{folder} is a {', '.join(kinds)} whose head {HEAD} [1, {shape.hidden_size}] is {found}; copy the "
                "model again, or use a language model"
            )
        if not has_tokenizer(folder):
            raise JobFileError(
                f"{folder} has no tokenizer, so its tokens cannot be compared with the policy's; copy its "
                "tokenizer's files there"
            )
    except JobFileError as error:
        raise JobFileError(f"{FIELD}: {error}") from error
    return shape


def check_fits(shape: Shape, ways: TrainerParallelism, *, vocabulary: int | None, longest: int | None) -> None:
    """Raises ``JobFileError`` for a critic that lacks rows for the policy's ``vocabulary``, whose context is shorter
    than the ``longest`` sequence (None: that is not known), or whose heads the ranks cannot divide."""
    if vocabulary is not None and shape.vocabulary_size < vocabulary:
        raise JobFileError(
            f"{FIELD}: its embedding has {shape.vocabulary_size} rows, but the policy's has {vocabulary}; start the "
            "critic from a model with the same number"
        )
    if longest is not None and longest > shape.context_length:
        raise JobFileError(
            f"{FIELD}: its context is {shape.context_length} tokens, but spec.data.maxPromptTokens and "
            f"spec.rollout.maxResponseTokens add up to {longest}; lower one of them, or use another model"
        )
    context, tensor = ways.context, ways.tensor
    if tensor > 1 and shape.family not in TENSOR_FAMILIES:
        raise JobFileError(
            f"{FIELD}: tensor parallelism does not support {shape.family} (only {', '.join(TENSOR_FAMILIES)}); use "
            "spec.trainer.parallelism.tensor: 1, or another model"
        )
    for heads, what, ranks in (
        (shape.kv_heads, "key", tensor),
        (shape.heads, "attention", context * tensor),
    ):
        if heads % ranks:
            raise JobFileError(
                f"{FIELD}: its {heads} {what} heads cannot be divided among the ranks of spec.trainer.parallelism "
                f"(context {context} x tensor {tensor}); use divisors, or another model"
            )


def check_same_tokens(critic: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Raises ``JobFileError`` naming a token of the policy that has another id, or none, in the critic's tokenizer."""
    theirs = critic.get_vocab()
    for token, number in sorted(policy.get_vocab().items(), key=lambda entry: entry[1]):
        if theirs.get(token) != number:
            there = f"the id {theirs[token]}" if token in theirs else "none"
            raise JobFileError(
                f"{FIELD}: its tokenizer differs from the policy's: {token!r} has the id {number} there, {there} here; "
                "start the critic from a model with the policy's tokenizer"
            )


def _kinds(config: dict[str, Any]) -> list[str]:
    return [str(kind) for kind in config.get("architectures") or ()]


def _labels(config: dict[str, Any]) -> Any:
    names = config.get("id2label")
    return config.get("num_labels", len(names) if isinstance(names, dict) else 2)

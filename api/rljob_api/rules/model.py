"""Rules about spec.model."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.cel import MODEL, RANDOM, SPEC, Cel, given
from rljob_api.rules.registry import Job, exactly_one, rule
from rljob_api.violations import Violation

SMALLEST_VLLM_HEAD = 32
_REPLAYS = "(has(self.algorithm.routingReplay) && self.algorithm.routingReplay)"


@rule(cel=Cel(MODEL, "has(self.source) != has(self.random)", "needs exactly one of source and random"))
def model_is_source_or_random(job: Job) -> Iterator[Violation]:
    model = job.spec.model
    yield from exactly_one("spec.model", ("source", "random"), (model.source, model.random))


@rule(
    cel=[
        Cel(MODEL, f"!has(self.random) || !has(self.{name})", "does not apply to a random model; remove it", f".{name}")
        for name in ("revision", "tokenizer")
    ]
)
def random_model_has_no_source_settings(job: Job) -> Iterator[Violation]:
    model = job.spec.model
    if model.random is None:
        return
    for name, value in (("revision", model.revision), ("tokenizer", model.tokenizer)):
        if value is not None:
            yield Violation(
                f"spec.model.{name}",
                "does not apply to a random model",
                "remove it" if name == "revision" else "use spec.model.random.tokenizer",
            )


@rule(
    cel=Cel(
        (*RANDOM, "tokenizer"), "has(self.characters) != has(self.source)", "needs exactly one of characters and source"
    )
)
def random_tokenizer_is_characters_or_source(job: Job) -> Iterator[Violation]:
    if random := job.spec.model.random:
        tokenizer = random.tokenizer
        path = "spec.model.random.tokenizer"
        yield from exactly_one(path, ("characters", "source"), (tokenizer.characters, tokenizer.source))


@rule(not_in_cel="CEL cannot take text apart into characters at a bounded cost")
def tokenizer_characters_differ(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    characters = (random.tokenizer.characters or "") if random else ""
    if twice := sorted({c for c in characters if characters.count(c) > 1}):
        yield Violation(
            "spec.model.random.tokenizer.characters",
            f"contains {', '.join(map(repr, twice))} more than once",
            "write each character once",
        )


@rule(
    cel=Cel(
        RANDOM, "self.hiddenSize % self.heads == 0", "must divide hiddenSize; choose heads that divide it", ".heads"
    )
)
def heads_divide_hidden_size(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.hidden_size % random.heads:
        yield Violation(
            "spec.model.random.heads",
            f"{random.heads} does not divide hiddenSize = {random.hidden_size}",
            "choose heads that divide it",
        )


@rule(
    cel=Cel(
        RANDOM,
        "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
        "must divide heads; choose a divisor",
        ".kvHeads",
    )
)
def kv_heads_divide_heads(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.kv_heads and random.heads % random.kv_heads:
        yield Violation(
            "spec.model.random.kvHeads",
            f"{random.kv_heads} does not divide heads = {random.heads}",
            "choose a divisor of heads",
        )


@rule(cel=Cel(RANDOM, "self.expertsPerToken <= self.experts", "must not exceed experts; lower it", ".expertsPerToken"))
def tokens_find_their_experts(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.experts_per_token > random.experts:
        yield Violation(
            "spec.model.random.expertsPerToken",
            f"{random.experts_per_token} exceeds experts = {random.experts}",
            "lower it, or raise experts",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.model.random) || self.model.random.family != 'qwen3_moe' || self.rollout.engine != 'torch'",
        "the torch engine does not support mixtures of experts; use engine: vllm",
        ".rollout.engine",
    )
)
def experts_are_for_vllm(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.family == "qwen3_moe" and job.spec.rollout.engine == "torch":
        yield Violation(
            "spec.rollout.engine",
            "the torch engine does not support mixtures of experts (qwen3_moe)",
            "use engine: vllm, or another family",
        )


@rule(
    cel=[
        Cel(
            SPEC,
            f"!{_REPLAYS} || self.rollout.engine == 'vllm'",
            "needs rollout.engine: vllm, which reports its routers' choices; set it, or remove this",
            ".algorithm.routingReplay",
        ),
        Cel(
            SPEC,
            f"!{_REPLAYS} || !has(self.model.random) || self.model.random.family == 'qwen3_moe' && "
            "self.model.random.expertsPerToken > 1 && self.model.random.experts <= 256",
            "needs a mixture of at most 256 experts, two or more per token; remove it, or change the model",
            ".algorithm.routingReplay",
        ),
    ]
)
def routing_is_replayed_of_mixtures(job: Job) -> Iterator[Violation]:
    """The stream has a byte for each choice, and one expert k times in it stands for a token of which nothing was
    told: of one expert a token that could not be told apart from a choice."""
    random, path = job.spec.model.random, "spec.algorithm.routingReplay"
    if not job.resolved.algorithm.routing_replay:
        return
    if job.spec.rollout.engine != "vllm":
        yield Violation(path, "only vLLM reports which experts its routers choose", "set rollout.engine: vllm")
    if random and (random.family != "qwen3_moe" or random.experts_per_token < 2 or random.experts > 256):
        yield Violation(
            path,
            "it supports mixtures of at most 256 experts, with two or more experts per token",
            "remove it, or change spec.model.random",
        )


@rule(
    cel=Cel(
        RANDOM,
        "self.family != 'gemma2' || self.tieEmbeddings",
        "gemma2 ties input and output embeddings; remove it",
        ".tieEmbeddings",
    )
)
def gemma2_has_one_embedding(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.family == "gemma2" and not random.tie_embeddings:
        yield Violation(
            "spec.model.random.tieEmbeddings",
            "gemma2 ties input and output embeddings",
            "remove it, or use another family",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.model.random) || self.rollout.engine != 'vllm' || "
        f"self.model.random.hiddenSize >= {SMALLEST_VLLM_HEAD} * self.model.random.heads",
        f"hiddenSize / heads must be {SMALLEST_VLLM_HEAD} or more for vLLM; use fewer heads or rollout.engine: torch",
        ".model.random.heads",
    )
)
def vllm_needs_wide_heads(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and job.spec.rollout.engine == "vllm" and random.hidden_size < SMALLEST_VLLM_HEAD * random.heads:
        yield Violation(
            "spec.model.random.heads",
            f"hiddenSize / heads = {random.hidden_size / random.heads:g} is less than {SMALLEST_VLLM_HEAD}, "
            "which vLLM cannot run",
            "use fewer heads, a larger hiddenSize, or rollout.engine: torch",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.model.random) || "
        "self.data.maxPromptTokens + self.rollout.maxResponseTokens <= self.model.random.contextLength",
        "is less than data.maxPromptTokens + rollout.maxResponseTokens; raise it, or lower one of the two",
        ".model.random.contextLength",
    )
)
def lengths_fit_the_random_models_context(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random is None:
        return
    prompt, response = job.spec.data.max_prompt_tokens, job.spec.rollout.max_response_tokens
    if prompt + response > random.context_length:
        yield Violation(
            "spec.model.random.contextLength",
            f"{random.context_length} is less than data.maxPromptTokens + rollout.maxResponseTokens = "
            f"{prompt} + {response}",
            f"raise it to {prompt + response}, or lower one of the two",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.model.random) || !has(self.data.validation) || self.data.validation.all(v, "
        "!has(v.sampling.maxResponseTokens) || "
        "self.data.maxPromptTokens + v.sampling.maxResponseTokens <= self.model.random.contextLength)",
        "sampling.maxResponseTokens and data.maxPromptTokens together exceed the model's context; lower one of them",
        ".data.validation",
    )
)
def validation_lengths_fit_the_random_models_context(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    for index, part in enumerate(job.spec.data.validation):
        longest, prompt = part.sampling.max_response_tokens, job.spec.data.max_prompt_tokens
        if random and longest and prompt + longest > random.context_length:
            yield Violation(
                f"spec.data.validation[{index}].sampling.maxResponseTokens",
                f"with data.maxPromptTokens = {prompt} it exceeds the model's context of {random.context_length}",
                f"lower it to {max(1, random.context_length - prompt)}",
            )


MIXTURE = "qwen3_moe"
"""The family with experts, as ``model.random`` calls it."""
_RANDOM, _WAYS = "self.model.random", "self.trainer.parallelism"


@rule(
    cel=Cel(
        SPEC,
        f"!has({_RANDOM}) || {_RANDOM}.heads % ({_WAYS}.context * {_WAYS}.tensor) == 0",
        "context x tensor must divide the model's heads; choose divisors",
        ".trainer.parallelism",
    )
)
def ranks_divide_heads(job: Job) -> Iterator[Violation]:
    random, ways = job.spec.model.random, job.spec.trainer.parallelism
    if random and random.heads % (ways.context * ways.tensor):
        yield Violation(
            "spec.trainer.parallelism",
            f"context x tensor = {ways.context} x {ways.tensor} ranks does not divide the {random.heads} attention "
            "heads of spec.model.random",
            f"use divisors of {random.heads}",
        )


@rule(
    cel=[
        Cel(
            SPEC,
            f"!has({_RANDOM}) || {given(f'{_RANDOM}.kvHeads', f'{_RANDOM}.heads')} % {_WAYS}.tensor == 0",
            "tensor must divide the model's key heads; choose a divisor",
            ".trainer.parallelism.tensor",
        ),
        Cel(
            SPEC,
            f"!has({_RANDOM}) || {_WAYS}.tensor == 1 || {_RANDOM}.family != '{MIXTURE}'",
            "mixtures of experts do not support tensor parallelism; use tensor: 1",
            ".trainer.parallelism.tensor",
        ),
    ]
)
def tensor_ranks_divide_the_layers(job: Job) -> Iterator[Violation]:
    random, tensor = job.spec.model.random, job.spec.trainer.parallelism.tensor
    if random is None or tensor == 1:
        return
    path, kv_heads = "spec.trainer.parallelism.tensor", random.kv_heads or random.heads
    if kv_heads % tensor:
        yield Violation(
            path,
            f"its {tensor} ranks do not divide the {kv_heads} key heads of spec.model.random",
            f"use a divisor of {kv_heads}",
        )
    if random.family == MIXTURE:
        yield Violation(
            path,
            f"mixtures of experts ({MIXTURE}) do not support tensor parallelism in the trainer",
            "use 1, and shard instead",
        )

"""The three models of a learner as modules over packed rows: actor, critic and frozen reference.

Their forward passes return exactly the streams that losses are made of, so that everything that touches a parameter
happens inside a module's forward (which is what sharding hooks into). Sharding and checkpointing are applied from
outside, by a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rljob_trainer.algorithms.vocabulary_kl import chunked_kl, exact_kl
from rljob_trainer.episodes.tokens import ByteArray, IntArray
from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.attention import ATTENTION, Gather, Packed
from rljob_trainer.learner.context import Context, Whole
from rljob_trainer.learner.last_layer import compute_outputs_only
from rljob_trainer.learner.loading import FolderWeights, skeleton
from rljob_trainer.learner.logprobs import default_chunk, log_probs_and_entropy, sum_squared_probs
from rljob_trainer.learner.moves import upload
from rljob_trainer.learner.packing import Row
from rljob_trainer.learner.protocol import Int64Array, NetworkSize
from rljob_trainer.learner.routing_replay import replay_routing
from rljob_trainer.learner.tensor import TensorRanks
from rljob_trainer.learner.vocabulary import VocabularyPart
from rljob_trainer.models.config import FAMILIES, read_json, soft_caps, unsupported_by_learner
from rljob_trainer.models.critic_start import HEAD, has_head
from rljob_trainer.models.soft_capping import soft_capped

Module = TypeVar("Module", bound=nn.Module)
_OUTPUT_MATRIX = frozenset({"lm_head.weight"})
"""Of no use to a critic, and sequence classifications have none."""


@dataclass(slots=True)
class PackedRow:
    """One row's tensors on the device of the model that reads them. With ``context``: a rank's part of it."""

    token_ids: torch.Tensor  # [1, N], or [1, n] of a part
    positions: torch.Tensor  # the same
    attention: Packed
    outputs: Gather  # [tokens] out of the last hidden states: [N] rows, or [M] where the last layer computes no others
    targets: torch.Tensor  # [tokens]
    finals: torch.Tensor | None  # [S]
    alike: Gather | None = None
    """Where many response tokens are the same ones, of turns that sequences have in common: ``outputs`` and ``targets``
    are the different ones, ``[different]``, and this makes ``[tokens]`` of them. None: they are all there."""
    whole_tokens: Whole | None = None
    """Makes streams over all response tokens of those over this rank's; None: it has them all."""
    whole_sequences: Whole | None = None
    """The same for streams over sequences."""

    def routed_anew(self) -> PackedRow:
        """The row for a model whose routers choose for themselves."""
        return replace(self, attention=replace(self.attention, experts=None))

    @classmethod
    def of(
        cls,
        row: Row,
        token_ids: IntArray,
        device: torch.device,
        dtype: torch.dtype,
        *,
        outputs_only: bool = False,
        soft_capped: bool = False,
        context: Context | None = None,
        experts: ByteArray | None = None,
    ) -> PackedRow:
        """``token_ids`` of the whole batch; ``dtype`` is what the model computes in.

        ``outputs_only`` is for models whose last layer can leave rows out (``Policy.outputs_only``), ``soft_capped``
        for those whose attention scores have a cap (``Policy.soft_capped``). ``context``: the ranks that compute the
        row together; its length is a multiple of their number. ``experts [N, layers, k]`` are those that the actor's
        tokens are sent to; None: the ones that its routers choose.
        """

        if not len(token_ids):  # a rank without sequences runs a row of one token of no meaning
            token_ids = np.zeros(1, dtype=np.int32)

        def move(array: Any) -> torch.Tensor:
            return upload(torch.from_numpy(array), device)

        attention = Packed.of(row, device, dtype, outputs_only=outputs_only, soft_capped=soft_capped, context=context)
        if experts is not None:
            attention.experts = move(experts if context is None else experts[context.part(len(row.source))])
        if context is not None:
            total, part = len(row.source), context.part(len(row.source))
            tokens, own, own_rows = Whole.of(row.output_rows, total, context, device)
            sequences = finals = None
            if row.final_rows is not None:
                sequences, _, finals = Whole.of(row.final_rows, total, context, device)
            return cls(
                token_ids=move(token_ids[row.source[part]].astype("int64"))[None],
                positions=move(row.positions[part])[None],
                attention=attention,
                **_outputs(own_rows, token_ids[row.targets[own]], total // context.size, device),
                finals=None if finals is None else move(finals),
                whole_tokens=tokens,
                whole_sequences=sequences,
            )
        rows, output_rows, final_rows = len(row.source), row.output_rows, row.final_rows
        if attention.last is not None:
            rows, output_rows = len(row.last_rows), np.searchsorted(row.last_rows, output_rows)
            final_rows = None if final_rows is None else np.searchsorted(row.last_rows, final_rows)
        return cls(
            token_ids=move(token_ids[row.source].astype("int64"))[None],
            positions=move(row.positions)[None],
            attention=attention,
            **_outputs(output_rows, token_ids[row.targets], rows, device),
            finals=None if final_rows is None else move(final_rows),
        )

    def streams(self, *different: torch.Tensor) -> Sequence[torch.Tensor]:
        """``[tokens]`` each, of streams over the ``[different]`` response tokens that this rank computes, and of those
        over all."""
        if self.alike is not None:
            # One by one: a stream without a gradient has none, not one of zeros.
            different = tuple(self.alike(stream[:, None])[:, 0] for stream in different)
        return different if self.whole_tokens is None else self.whole_tokens(*different)


_WORTH_JOINING = 1.05
"""So many times as many response tokens as rows that predict them make it worth looking for those that are the same."""


class _Outputs(TypedDict):
    outputs: Gather
    targets: torch.Tensor
    alike: Gather | None


def _outputs(output_rows: Int64Array, targets: IntArray, rows: int, device: torch.device) -> _Outputs:
    """What predicts the response tokens ``targets [tokens]``: ``output_rows [tokens]`` of so many ``rows``."""
    alike = None
    if len(output_rows) > _WORTH_JOINING * np.count_nonzero(np.bincount(output_rows, minlength=rows)):
        _, first, number = np.unique(
            output_rows * (1 << 32) + targets.astype(np.int64), return_index=True, return_inverse=True
        )
        alike = Gather.of(number, len(first)).to(device)
        output_rows, targets = output_rows[first], targets[first]
    return _Outputs(
        outputs=Gather.of(output_rows, rows).to(device),
        targets=upload(torch.from_numpy(targets.astype(np.int64)), device),
        alike=alike,
    )


class PolicyStreams(NamedTuple):
    """What a policy's forward pass gives; streams ``[tokens]``, whoever computed them."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    sum_squared_probs: torch.Tensor | None
    states: torch.Tensor | None  # [different, d] the hidden states that predict this rank's tokens (``PackedRow``)
    vocabulary_kl: torch.Tensor | None  # exact KL to the reference


class Compared(NamedTuple):
    """What the exact KL needs of the reference, and the log-probs that its forward pass gives besides."""

    states: torch.Tensor  # [different, d] of this rank's tokens
    weight: torch.Tensor  # [vocabulary, d], or the rows of this rank's words
    log_probs: torch.Tensor  # [tokens]


class Policy(nn.Module):
    """A causal language model that tells log-probs; actor and reference are both one.

    The output head is here, for all backends: one that spreads layers differently overrides ``hidden``, and one whose
    rank has no head (an early stage of a pipeline) sets ``predicts`` to False and gives no token a log-prob.
    """

    predicts = True
    """Whether the losses of this rank's tokens are computed here."""

    def __init__(self, language_model: PreTrainedModel, chunk: int | None, tensor: TensorRanks | None = None) -> None:
        """``tensor``: the ranks among which the output matrix will be divided, if any."""
        super().__init__()
        self.language_model = language_model
        self.chunk = chunk
        self.part = None if tensor is None else VocabularyPart(tensor, len(self.output_weight))
        self.outputs_only = compute_outputs_only(self.layers)
        replay_routing(self.layers)
        caps = soft_caps(language_model.config.to_dict())
        self.logit_cap = caps.logits
        self.soft_capped = caps.scores is not None
        self.compiled_head = False
        """Whether log-probs come from ``compiled_head.py``."""

    def forward(
        self,
        row: PackedRow,
        temperature: float,
        *,
        squares: bool = False,
        states: bool = False,
        reference: Compared | None = None,
    ) -> PolicyStreams:
        """Log-probs and entropy, and what else is asked for. ``reference``: for the exact KL to it."""
        states_read = row.outputs(self.hidden(row))
        hidden = states_read if self.part is None else self.part.ranks.entering(states_read)
        weight, part = self.output_weight, self.part
        log_probs, entropy = log_probs_and_entropy(
            hidden,
            weight,
            row.targets,
            temperature=temperature,
            chunk=self.chunk,
            cap=self.logit_cap,
            part=part,
            compiled=self.compiled_head,
        )
        kl = None
        if reference is not None:
            kl = chunked_kl(
                hidden,
                lambda x: soft_capped(x @ weight.T, self.logit_cap),
                reference.states,
                lambda x: soft_capped(x @ reference.weight.T, self.logit_cap),  # all models are of one family
                temperature=temperature,
                chunk=self.chunk or default_chunk(weight, part),
                divergence=exact_kl if part is None else part.exact_kl,
            )
        squared = None
        if squares:
            squared = sum_squared_probs(
                hidden, weight, temperature=temperature, chunk=self.chunk, cap=self.logit_cap, part=part
            )
        there = [stream for stream in (log_probs, entropy, squared, kl) if stream is not None]
        whole = iter(row.streams(*there))
        log_probs, entropy = next(whole), next(whole)
        squared = None if squared is None else next(whole)
        kl = None if kl is None else next(whole)
        return PolicyStreams(log_probs, entropy, squared, states_read if states else None, kl)

    def hidden(self, row: PackedRow) -> torch.Tensor:
        """Last hidden states ``[N, d]``, or ``[M, d]`` of the rows that are read."""
        return _hidden(self.language_model.base_model, row)

    @property
    def layers(self) -> list[nn.Module]:
        return _layers(self.language_model, set(self.language_model._no_split_modules or ()))

    @property
    def output_weight(self) -> torch.Tensor:
        """The matrix ``[vocabulary, d]`` that turns a hidden state into logits, or this rank's rows of it."""
        weight: torch.Tensor = self.language_model.get_output_embeddings().weight
        return weight

    @property
    def output_parameters(self) -> int:
        """The parameters of that matrix."""
        return self.output_weight.numel()

    @property
    def experts(self) -> int:
        """In each layer that has any; 0: the model is dense."""
        return int(getattr(self.language_model.config, "num_experts", 0) or 0)

    def published(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under transformers' names; a shared matrix once, as in the folder's own files. What those call
        otherwise ``published.py`` knows."""
        yield from self.language_model.named_parameters()


class Critic(nn.Module):
    """A decoder with a value for each position instead of a distribution. The head begins at zero."""

    predicts = True

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone: Any = language_model.base_model
        self.config: Any = language_model.config
        self._no_split = set(language_model._no_split_modules or ())
        self.head = nn.Linear(language_model.config.hidden_size, 1, dtype=language_model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.outputs_only = compute_outputs_only(self.layers)
        self.soft_capped = soft_caps(language_model.config.to_dict()).scores is not None

    def forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor | None]:
        """V before each response token ``[tokens]``, and V after the last token ``[S]`` if the row keeps it."""
        hidden = _hidden(self.backbone, row)
        # One small product in float32: a value in half precision would have three digits.
        values = nn.functional.linear(hidden.float(), self.head.weight.float(), self.head.bias.float())
        finals = None if row.finals is None else values[row.finals, 0]
        (before,) = row.streams(row.outputs(values)[:, 0])
        if finals is not None and row.whole_sequences is not None:
            (finals,) = row.whole_sequences(finals)
        return before, finals

    @property
    def layers(self) -> list[nn.Module]:
        return _layers(self.backbone, self._no_split)

    @property
    def output_parameters(self) -> int:
        return self.head.weight.numel()


def load_policy(
    folder: Path,
    *,
    dtype: torch.dtype,
    chunk: int | None = None,
    trust_remote_code: bool = False,
    empty: bool = False,
    tensor: TensorRanks | None = None,
) -> Policy:
    """The language model of a Hugging Face folder, with attention over packed rows and without dropout. ``empty``: its
    parameters get their values later (``loading.py``). ``tensor``: ranks that will divide its matrices."""
    return Policy(_load(folder, dtype, trust_remote_code, empty), chunk, tensor)


def size_of(module: Policy | Critic) -> NetworkSize:
    """The size of a whole model, before it is cut up. What is looked up and not multiplied with does not count."""
    if isinstance(module, Critic):
        return _size(module, module.config, without=module.backbone.get_input_embeddings().weight.numel())
    model = module.language_model
    embedding: Any = model.get_input_embeddings().weight
    shared = embedding is model.get_output_embeddings().weight
    return _size(model, model.config, without=0 if shared else embedding.numel())


def _size(model: nn.Module, config: Any, *, without: int) -> NetworkSize:
    """``without`` so many parameters."""
    every = sum(parameter.numel() for parameter in model.parameters())
    if experts := getattr(config, "num_experts", 0):
        stacks = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
        every -= stacks * (experts - config.num_experts_per_tok) // experts
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return NetworkSize(every - without, config.num_hidden_layers, heads * head)


def load_critic(
    folder: Path,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    empty: bool = False,
    field: str = "spec.model",
) -> Critic:
    """A value model that starts from a folder, which ``field`` of the job file names. A sequence classification's head
    is kept; another model's begins at zero."""
    critic = Critic(_load(folder, dtype, trust_remote_code, empty, field, _OUTPUT_MATRIX))
    if has_head(folder):
        weight = critic.head.weight
        with torch.no_grad():
            weight.copy_(FolderWeights(folder, field).tensor(HEAD, tuple(weight.shape)))
    return critic


def names_in_files(module: Policy | Critic) -> dict[nn.Parameter, str]:
    """The parameters that come from the model's folder, by transformers' names for them (``published.py``)."""
    if isinstance(module, Policy):
        return {parameter: name for name, parameter in module.language_model.named_parameters()}
    prefix = module.backbone.base_model_prefix
    return {parameter: f"{prefix}.{name}" for name, parameter in module.backbone.named_parameters()}


def layer_matrices(module: nn.Module) -> list[str]:
    """Names of the matrices inside a model's layers: not embeddings, output matrix, value head, norms and biases."""
    layers: list[nn.Module] = module.layers  # type: ignore[assignment]  # a Policy or a Critic
    inside = {id(p) for layer in layers for p in layer.parameters() if p.ndim in (2, 3)}
    return [name for name, parameter in module.named_parameters() if id(parameter) in inside]


def checkpoint_activations(layers: list[nn.Module]) -> None:
    """Keeps only each layer's input for the backward pass and computes the layer again there.

    The layer's forward is wrapped, not the layer: parameter names stay, and sharding hooks, which sit around forward,
    gather weights once for the second computation.
    """
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def place(module: Module, device: torch.device, dtype: torch.dtype | None) -> Module:
    """Moves a module to ``device`` and its parameters to ``dtype`` (None: as they are), in place; returns it.

    Buffers keep their precision. Rotary frequencies are one, in float32: rounded to bfloat16, an angle at position
    2,000 would be off by several radians (relative error 2^-9), and two models with equal weights would disagree.
    """
    # The tensors themselves: ``Module.to`` puts others, rounded, in their place.
    buffers = list(module.named_buffers(remove_duplicate=False))
    module.to(device, dtype)
    for name, buffer in buffers:
        owner, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(owner), own_name, buffer.to(device))
    return module


def _hidden(backbone: nn.Module, row: PackedRow) -> torch.Tensor:
    """Last hidden states ``[N, d]``, or ``[M, d]`` of the rows that are read."""
    # A mask of four dimensions is passed through untouched: the model builds none of its own.
    no_mask = row.positions.new_empty(1, 1, 1, 1)
    out = backbone(
        input_ids=row.token_ids,
        position_ids=row.positions,
        attention_mask=no_mask,
        use_cache=False,
        packed=row.attention,
    )
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def _layers(model: nn.Module, names: set[str]) -> list[nn.Module]:
    """Modules of the classes ``names``; sharding makes a class of its own out of each."""
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


def _load(
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool,
    empty: bool = False,
    field: str = "spec.model",
    unread: Set[str] = frozenset(),
) -> PreTrainedModel:
    """``unread``: tensors that a folder may lack, since nobody reads them."""
    if (problem := unsupported_by_learner(read_json(folder / "config.json"))) is not None:
        raise JobFileError(f"{field}: the learner {problem}, see {folder}; train another model")
    # Loading reports go to the driver's log by way of errors only; progress bars of many ranks would garble it.
    transformers_logging.disable_progress_bar()
    load: Any = AutoModelForCausalLM.from_pretrained  # its types know nothing of output_loading_info
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "trust_remote_code": trust_remote_code}
    try:
        if empty:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            with skeleton():
                loaded = AutoModelForCausalLM.from_config(config, **how)
            loaded.tie_weights()  # inside, each name gets a parameter of its own
            missing: list[str] = []
        else:
            loaded, told = load(folder, output_loading_info=True, **how)
            missing = sorted(set(told["missing_keys"]) - unread)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise JobFileError(
            f"{field}: the model in {folder} cannot be loaded, because a package is missing ({error}); install "
            "it, or use another model"
        ) from error
    except Exception as error:  # transformers' many classes raise what they like
        raise JobFileError(
            f"{field}: the model in {folder} cannot be loaded ({type(error).__name__}: {error}); copy it again, or "
            "use another one"
        ) from error
    model: PreTrainedModel = loaded
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise JobFileError(
            f"{field}: {folder} lacks the tensor {missing[0]}{more}, which would start random; copy the model again"
        )
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise JobFileError(
            f"the model in {folder} ({config.model_type}) has no plain output matrix; "
            f"use a model with one ({', '.join(FAMILIES)})"
        )
    config.use_cache = False
    if getattr(config, "attention_dropout", 0.0):
        config.attention_dropout = 0.0
    for module in model.modules():
        # Tokens must have the same log-probs when they are scored and when they are trained.
        for name in ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout",):
            if getattr(module, name, 0.0):
                setattr(module, name, 0.0)
    model.eval()
    return model

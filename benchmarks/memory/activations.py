"""Peak bytes of a forward and backward pass of the learner's own code, of tensors that have shapes and no memory.

The tensors are torch's fake ones and stand on "the CPU"; rows are laid out for a GPU (one variable-length flash call).
What is counted are storages while they live. Weights and their gradients are not: which of them are there at a time is
FSDP2's matter (``rank.py`` here).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PretrainedConfig

from rljob_trainer.algorithms import segments
from rljob_trainer.learner import context as contexts
from rljob_trainer.learner import moves
from rljob_trainer.learner.attention import ATTENTION
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.gradients import ActorGradient, CriticGradient, Place
from rljob_trainer.learner.logprobs import device_chunk
from rljob_trainer.learner.models import Critic, Policy, checkpoint_activations
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.work import cut

Model = Literal["actor", "critic"]
_CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Inside, counts the bytes of what operations make, until it is let go of. Whatever is asked for on a GPU is made
    on the pretended CPU."""

    def __init__(self, *known: torch.Tensor) -> None:
        """``known``: those that do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = _CPU
        result = function(*args, **options)
        for made in tree_iter(result):
            if isinstance(made, torch.Tensor):
                self._note(made.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._seen.discard(key)
            self.now -= nbytes

        weakref.finalize(storage, gone)


def peak_bytes(
    config: PretrainedConfig,
    model: Model,
    *,
    prompt: int,
    response: int,
    budget: int,
    memory: int,
    checkpointing: bool,
    chunk: int | None = None,
    context: int = 1,
) -> int:
    """Of a micro-batch of ``budget`` tokens in bfloat16, of sequences as long as can be, on a GPU of ``memory`` bytes.

    Of ``context`` ranks that compute it together it is the last one's, whose part has no prompt.
    """
    sequences = max(1, budget // (prompt + response))
    tokens = sequences * response
    batch = SequenceBatch(
        np.arange(sequences * (prompt + response), dtype=np.int32) % config.vocab_size,
        np.full(sequences, prompt),
        np.full(sequences, response),
        np.ones(tokens, np.bool_),
        advantages=np.ones(tokens, np.float32),
        returns=np.ones(tokens, np.float32),
        values=np.ones(tokens, np.float32),
    )
    work = cut(batch, [range(sequences)], [Placement(0)], RowRules(sequences * (prompt + response)))
    group: Any = None  # what would go through it is pretended
    shared = contexts.Context(group, context, context - 1) if context > 1 else None
    with _pretended():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).eval()
        chunk = chunk or device_chunk(config.vocab_size, memory)
        module = Policy(network, chunk) if model == "actor" else Critic(network)
        if checkpointing:
            checkpoint_activations(module.layers)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
        place = Place(
            torch.device("cuda", 0),
            torch.bfloat16,
            outputs_only=module.outputs_only,
            length_multiple=context,
            context=shared,
        )
        loss = LossSettings(value_clip=0.5)
        with LiveBytes(*module.parameters(), *module.buffers()) as live:
            if isinstance(module, Policy):
                ActorGradient(module, None, work.shares[0], 0, loss, place, 0)(module, 0)
            else:
                CriticGradient(work.shares[0], 0, loss, place)(module, 0)
    peak: int = live.peak
    return peak


@contextmanager
def _pretended() -> Iterator[None]:
    """Tensors without memory; what CPUs are spared by a look into the numbers is done, as on GPUs; and other ranks
    send as much as they get."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(segments, "all_kept", lambda mask: False),
        patch.object(moves, "_uploads", lambda device: lambda tensor: tensor.to(device)),
        patch.object(contexts, "_exchange", lambda x, group: torch.empty_like(x.contiguous())),
        patch.object(torch.distributed, "all_reduce", lambda x, group: None),
    ):
        yield


def _drop(parameter: torch.Tensor) -> None:
    """As FSDP2 does, which adds it to the shards."""
    parameter.grad = None

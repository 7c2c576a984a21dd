"""Low-rank adapters (arXiv:2106.09685) of peft inside a policy or a critic, beside its linear layers.

    y = W x + scale B A x        W frozen, A [rank, in] and B [out, rank] trained, B begins at zero

The model's own weights need no gradient, no optimizer state and no float32 copy. With ``adapters_off`` the modules
compute as if there were no adapter: that is the reference. What engines get is W + scale B A (``merged``), under the
names that the model has without an adapter.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from rljob_trainer.errors import JobFileError, UnsavedError
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.models import Critic, Policy
from rljob_trainer.learner.settings import LoraSettings
from rljob_trainer.models.stored import tensors_in
from rljob_trainer.weights.manifest import manifest_of

Named = Iterator[tuple[str, torch.Tensor]]

_NAME = "default"
"""Of the adapter, as peft calls one that nobody has named."""
_OFF: ContextVar[bool] = ContextVar("adapters_off", default=False)
"""Of the thread that computes: another lane may be at a pass with adapters."""
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter's numbers mean nothing without: kept in checkpoints, and compared when they are read."""

    base_sha256: str
    """Of the manifest of the tensors in the folder that the model came from."""
    rank: int
    alpha: int
    targets: tuple[str, ...]
    """The last parts of the names of the layers that have one, in order."""

    def described(self) -> dict[str, Any]:
        """The adapter's description as JSON has it."""
        return {**asdict(self), "targets": list(self.targets)}


def adapt(module: Policy | Critic, lora: LoraSettings, seed: int) -> tuple[str, ...]:
    """Freezes all of ``module`` but a critic's head, and puts adapters in float32 beside the linear layers that
    ``lora`` names. To be called before layers are wrapped or cut up. The same ``seed`` gives the same A on all ranks.

    Returns the last parts of the adapted layers' names. Raises ``JobFileError`` for a name that no linear layer has.
    """
    chosen = _chosen(module, lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen, lora_dropout=0.0, bias="none", init_lora_weights=True
    )
    inject_adapter_in_model(config, module, _NAME)  # which freezes all else
    if isinstance(module, Critic):
        module.head.float().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted(module):
        # peft makes them in the base's precision.
        first, second = (pair[_NAME].float().requires_grad_(True) for pair in (layer.lora_A, layer.lora_B))
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5), generator=generator)  # as peft and the paper's code do
        nn.init.zeros_(second.weight)
        layer.forward = functools.partial(_forward, layer, layer.forward)
    return tuple(sorted({name.rpartition(".")[2] for name in chosen}))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(layer: Any, with_adapter: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """``x [..., in]`` to ``[..., out]``."""
    if _OFF.get():
        without: torch.Tensor = layer.base_layer(x, *args)
        return without
    return with_adapter(x, *args)


@contextmanager
def adapters_off() -> Iterator[None]:
    """Inside, this thread computes with the base models alone. Only where no gradient is asked for: activations that
    are computed again in a backward pass are computed outside of it."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def linear_layers(module: Policy | Critic) -> list[str]:
    """Names of the linear layers inside of a model's layers."""
    inside = {id(part) for layer in module.layers for part in layer.modules()}
    return [name for name, part in module.named_modules() if type(part) is nn.Linear and id(part) in inside]


def _chosen(module: Policy | Critic, targets: Iterable[str]) -> list[str]:
    every = linear_layers(module)
    if not targets:
        return every
    chosen: set[str] = set()
    for target in targets:
        found = [name for name in every if name.endswith(f".{target}")]
        if not found:
            known = sorted({name.rpartition(".")[2] for name in every})
            raise JobFileError(
                f"spec.model.lora.targets: no linear layer of the model's layers is called {target}; use one of "
                f"{', '.join(known[:_SHOWN])}"
            )
        chosen.update(found)
    return [name for name in every if name in chosen]


def _adapted(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, LoraLayer)]


# --- what goes out ----------------------------------------------------------------------------------------------------


def merged(policy: Policy, layout: Layout) -> Named:
    """``(Hugging Face name, parameter)`` as ``Policy.published`` gives them without an adapter, laid out like the
    base's own; where there is an adapter W + scale B A, in float32. All ranks iterate in step: A and B are gathered.

    Every rank computes the whole product, whatever its part of it: so its bits don't depend on the number of ranks.
    """
    layers = {name: part for name, part in policy.language_model.named_modules() if isinstance(part, LoraLayer)}
    layout.release(policy)
    for name, parameter in policy.language_model.named_parameters():
        owner, found, leaf = name.rpartition(".base_layer.")
        if not found:
            if name.rpartition(".lora_")[0] not in layers:
                yield name, parameter
        elif leaf == "weight":
            yield f"{owner}.weight", _sum(layers[owner], parameter, layout)
        else:
            yield f"{owner}.{leaf}", parameter


def _sum(layer: Any, weight: torch.Tensor, layout: Layout) -> torch.Tensor:
    pair = [("A", layer.lora_A[_NAME].weight), ("B", layer.lora_B[_NAME].weight)]
    first, second = (whole for _, whole in layout.gather(pair, lambda _: torch.float32))
    # In float64, so that what another device or another order of the sum makes different is lost in rounding.
    delta = (second.double() @ first.double()).mul_(layer.scaling[_NAME]).float()
    own = layout.local(weight.detach())
    return layout.like(own.float() + layout.part(delta, weight).to(own.device), weight)


def matrices(policy: Policy, layout: Layout) -> Named:
    """A and B of all layers under the names that peft's files have, laid out as they are trained."""
    layout.release(policy)
    for name, parameter in policy.language_model.named_parameters():
        if f".{_NAME}." in name:
            yield f"base_model.model.{name.replace(f'.{_NAME}.', '.')}", parameter


def write_peft_folder(
    folder: Path, policy: Policy, layout: Layout, adapter: Adapter, *, base: str, writer: bool
) -> None:
    """Exports the adapter as peft reads it, into ``folder`` (made if missing). All ranks call it; the one with
    ``writer`` writes. ``base`` is said to be the model that it belongs to. Raises ``UnsavedError``."""
    gathered = layout.gather(matrices(policy, layout), lambda _: torch.float32)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in gathered}
    if not writer:
        return
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        weights = folder / "adapter_model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        shutil.copymode(folder / "adapter_config.json", weights)  # safetensors lets nobody but the owner read
    except OSError as error:
        raise UnsavedError(f"the adapter cannot be written to {folder}: {error}") from error


# --- whose it is ------------------------------------------------------------------------------------------------------


def base_digest(folder: Path) -> str:
    """SHA-256 of the manifest of all tensors that a model folder's files hold, whatever the files are called and
    whatever they are computed in. Rank 0 reads them, the others are told: a collective call."""
    told: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        told[0] = manifest_of(tensors_in(folder)).sha256
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    assert told[0] is not None
    return told[0]

"""One rank of the backend ``fsdp2``: its models are loaded, sharded over the ranks, and put on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner import export
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.backends.fsdp2.layout import DividedFsdp2Layout, Fsdp2Layout
from rljob_trainer.learner.backends.fsdp2.mesh import context_of, join, shard, tensor_of
from rljob_trainer.learner.backends.fsdp2.tensor import (
    DividedDimension,
    check_divisible,
    compute_in_parts,
    cut,
    divided_dimensions,
)
from rljob_trainer.learner.compiled import compile_layers
from rljob_trainer.learner.cpu.lanes import TwoLanes, two_lanes
from rljob_trainer.learner.cpu.plain_layer import compute_in_rows
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.loading import FolderWeights
from rljob_trainer.learner.models import (
    Critic,
    Policy,
    checkpoint_activations,
    load_critic,
    load_policy,
    names_in_files,
    place,
    size_of,
)
from rljob_trainer.learner.passes import OneByOne
from rljob_trainer.learner.process import prepare
from rljob_trainer.learner.protocol import LearnerFacts
from rljob_trainer.learner.rank import LearnerRank, SpreadModels
from rljob_trainer.learner.reference import WithoutAdapter
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings

if TYPE_CHECKING:
    from rljob_trainer.learner.lora import Adapter


def build_rank(
    settings: LearnerSettings,
    rank: int,
    address: str,
    timeout_seconds: float,
    placement: Placement,
    rules: RowRules,
) -> LearnerRank:
    """All ranks at once. ``address`` and ``timeout_seconds``: see ``Backend.start``."""
    device = prepare(settings)
    mesh = join(settings, rank, address, timeout_seconds)
    tensor = tensor_of(settings, timeout_seconds)
    if tensor is not None and settings.lora is not None:
        raise JobFileError(
            "spec.trainer.parallelism.tensor: does not support adapters; use 1, or remove spec.model.lora"
        )
    dimensions: dict[str, DividedDimension] = {}

    # What is cut up layer by layer is read layer by layer, in the files' own precision if that is half. An adapter has
    # to find the base's weights in place.
    empty = mesh is not None and settings.lora is None
    files = FolderWeights(settings.model_path) if empty else None

    def spread(
        module: Policy | Critic, masters: torch.dtype | None, files: FolderWeights | None, stored: torch.dtype
    ) -> None:
        """Parameters are kept in ``masters``; None: as they are. ``stored``: what holds those of ``files`` exactly."""
        names = names_in_files(module)

        def fill(part: nn.Module) -> None:
            if files is not None:
                files.fill(part, names.__getitem__, stored if masters == torch.float32 else settings.compute_dtype)
            if tensor is not None:
                cut(part, tensor)

        if tensor is not None:
            dimensions.update(divided_dimensions(module))
            compute_in_parts(module, tensor)
        elif settings.compile:
            compile_layers(module.layers)
            if isinstance(module, Policy):
                module.compiled_head = True
        else:
            compute_in_rows(module.layers)
        if settings.activation_checkpointing:
            checkpoint_activations(module.layers)
        shard(module, module.layers, mesh, settings.compute_dtype, fill)
        place(module, device, masters)

    def policy(dtype: torch.dtype) -> Policy:
        return load_policy(
            settings.model_path,
            dtype=dtype,
            chunk=settings.log_prob_chunk_tokens,
            trust_remote_code=settings.trust_remote_code,
            empty=empty,
            tensor=tensor,
        )

    def read_critic() -> tuple[Critic, FolderWeights | None, torch.dtype]:
        """What a critic starts from, its files where it is filled later, and the dtype of those."""
        if (own := settings.critic_model) is None:
            trusted = settings.trust_remote_code
            critic = load_critic(settings.model_path, dtype=stored, trust_remote_code=trusted, empty=empty)
            return critic, files, stored
        if settings.lora is not None:
            raise JobFileError(f"{own.field}: with spec.model.lora the critic is an adapter of that model; remove one")
        folder = own.folder()
        dtype = torch.float32 if mesh is None else export.stored_dtype(folder)
        critic = load_critic(folder, dtype=dtype, empty=empty, field=own.field)
        whose = f"the critic ({own.field})"
        check_divisible(critic.config.get_text_config(), settings.tensor, settings.context, whose)
        return critic, FolderWeights(folder, own.field) if empty else None, dtype

    stored = torch.float32 if mesh is None else export.stored_dtype(settings.model_path)
    if settings.lora is not None:  # what is not trained needs no more precision than it is computed in
        stored = settings.compute_dtype
    masters = torch.float32 if settings.lora is None else None
    actor = policy(stored)
    check_divisible(actor.language_model.config.get_text_config(), settings.tensor, settings.context)
    actor_size, critic_size = size_of(actor), None
    adapter = None if settings.lora is None else given_adapter(actor, settings, settings.lora)
    spread(actor, masters, files, stored)
    critic: Critic | None = None
    reference: Policy | WithoutAdapter | None = None
    if settings.critic is not None:
        critic, of_critic, held = read_critic()
        critic_size = size_of(critic)
        if settings.lora is not None:
            given_adapter(critic, settings, settings.lora)
        spread(critic, masters, of_critic, held)
    if settings.reference and adapter is not None:
        reference = WithoutAdapter(actor)
    elif settings.reference:
        reference = policy(settings.compute_dtype)
        reference.requires_grad_(False)
        spread(reference, settings.compute_dtype, files, stored)
    layout = Layout()
    if mesh is not None and tensor is not None:
        modules = [module for module in (actor, critic, reference) if isinstance(module, nn.Module)]
        layout = DividedFsdp2Layout(mesh.get_group("shard"), tensor, modules, dimensions)
    elif mesh is not None:
        layout = Fsdp2Layout(mesh.get_group("shard"))
    return LearnerRank(
        settings,
        rank,
        SpreadModels(
            actor=actor,
            critic=critic,
            reference=reference,
            layout=layout,
            placement=placement,
            rules=rules,
            device=device,
            facts=LearnerFacts(
                actor_size, critic_size, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            ),
            passes=TwoLanes() if two_lanes(settings) else OneByOne(),
            live_model=actor.language_model if settings.ranks == 1 and adapter is None else None,
            adapter=adapter,
            context=context_of(settings, timeout_seconds),
        ),
    )


def given_adapter(module: Policy | Critic, settings: LearnerSettings, lora: LoraSettings) -> Adapter:
    """Gives a model its adapter, in place; says what that belongs to."""
    # Only here: full fine-tuning needs no peft, whose import takes a second.
    from rljob_trainer.learner.lora import Adapter, adapt, base_digest

    targets = adapt(module, lora, settings.seed)
    return Adapter(base_digest(settings.model_path), lora.rank, lora.alpha, targets)

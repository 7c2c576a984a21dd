"""A learner rank on a GPU that is not there: torch's fake tensors have shapes and no numbers, its tracker counts them.

The rank is the real one, made by the backend's own builder; ranks beside it are played by torch's fake process group.
What a GPU would do otherwise than a CPU is said here: attention by one variable-length call, and the chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cut_for import cut_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.algorithms import kept, moments, segments
from rljob_trainer.learner import attention
from rljob_trainer.learner import rank as rank_module
from rljob_trainer.learner.attention import ATTENTION, Packed
from rljob_trainer.learner.backends.fsdp2 import Fsdp2, build
from rljob_trainer.learner.backends.fsdp2.mesh import context_of, tensor_of
from rljob_trainer.learner.context import Context
from rljob_trainer.learner.gradients import Place
from rljob_trainer.learner.models import Critic, Policy
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.tensor import TensorRanks


class _Unseen:
    """``Untouched`` reads numbers, which fake tensors have not got."""

    def __init__(self, *_: object) -> None: ...


def batch_of(groups: int, prompt: int, siblings: int, response: int) -> SequenceBatch:
    """Equal groups of equal lengths, with every stream."""
    count = groups * siblings
    tokens = count * response
    ids = []
    for group in range(groups):
        # Prompts differ, or they would be shared.
        start = np.full(prompt, group + 1, dtype=np.int32)
        ids += [start, np.zeros(response, dtype=np.int32)] * siblings
    ones = np.ones(tokens, dtype=np.float32)
    return SequenceBatch(
        token_ids=np.concatenate(ids),
        prompt_lengths=np.full(count, prompt),
        response_lengths=np.full(count, response),
        mask=np.ones(tokens, dtype=bool),
        advantages=ones,
        returns=ones,
        values=ones,
        old_log_probs=-ones,
        rollout_log_probs=-ones,
        ref_log_probs=-ones,
    )


class PretendGpu:
    """Counts the memory of an update of one rank among many."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def scoring_peak(self, config: dict[str, Any], settings: LearnerSettings, batch: SequenceBatch) -> int:
        """Bytes at the fullest moment of scoring a row of the whole ``batch`` by the actor."""
        settings = replace(settings, model_path=Path("nowhere"), device="cpu")
        with self._meshes(settings) as meshes, FakeTensorMode(allow_non_fake_inputs=True):
            tracker = MemTracker()
            with tracker:
                rank = self._rank(config, settings, *meshes)
                share = cut_for(batch, [range(len(batch))], ranks=1, token_budget=1 << 40).shares[0]
                place = Place(rank.device, settings.compute_dtype, outputs_only=True)
                _, row = place.row(share, share.micro_batches[0][0])
                with torch.no_grad():
                    rank.actor.module(row, 1.0)
            snapshot = tracker.get_tracker_snapshot("peak")
        return int(snapshot[torch.device("cpu")]["Total"])

    def peak(
        self,
        config: dict[str, Any],
        settings: LearnerSettings,
        batch: SequenceBatch,
        passes: int = 2,
    ) -> int:
        """Bytes at the fullest moment of an update of ``passes`` rows, each of them the whole ``batch``."""
        settings = replace(settings, model_path=Path("nowhere"), device="cpu")
        with self._meshes(settings) as meshes, FakeTensorMode(allow_non_fake_inputs=True):
            tracker = MemTracker()
            with tracker:
                rank = self._rank(config, settings, *meshes)
                share = cut_for(batch, [range(len(batch))], ranks=1, token_budget=1 << 40).shares[0]
                share.micro_batches[0] *= passes
                trained = [rank.actor] if rank.critic is None else [rank.critic, rank.actor]
                for part in trained:
                    rank.gradient([part], share, 0, LossSettings(), tracker.reset_mod_stats)
                    part.step()
            snapshot = tracker.get_tracker_snapshot("peak")
        return int(snapshot[torch.device("cpu")]["Total"])

    def _rank(
        self,
        config: dict[str, Any],
        settings: LearnerSettings,
        mesh: DeviceMesh,
        context: Context | None,
        tensor: TensorRanks | None,
    ) -> rank_module.LearnerRank:
        family = config["model_type"]
        made = AutoConfig.for_model(family, **{name: value for name, value in config.items() if name != "model_type"})

        def load(dtype: torch.dtype) -> Any:
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=ATTENTION)
            model.config.use_cache = False
            return model.eval()

        packed_of = Packed.of.__func__  # type: ignore[attr-defined]

        def by_flash(cls: type[Packed], row: Any, device: torch.device, dtype: torch.dtype, **options: Any) -> Packed:
            packed: Packed = packed_of(cls, row, torch.device("cuda"), dtype, **options)
            for part in (packed, packed.last):
                if part is not None and part.varlen is not None:
                    part.varlen = part.varlen.to(device)
                if part is not None and part.rows is not None:
                    part.rows = part.rows.to(device)
            return packed

        patch = self._patch
        patch.setattr(build, "load_policy", lambda *_, dtype, chunk, **__: Policy(load(dtype), chunk, tensor))
        patch.setattr(build, "load_critic", lambda *_, dtype, **__: Critic(load(dtype)))
        patch.setattr(build, "FolderWeights", lambda _: None)  # the weights are there, without numbers
        patch.setattr(build, "join", lambda *_: mesh)
        patch.setattr(build, "context_of", lambda *_: context)
        patch.setattr(build, "tensor_of", lambda *_: tensor)
        patch.setattr(build.export, "stored_dtype", lambda _: torch.bfloat16)
        patch.setattr(rank_module, "Untouched", _Unseen)
        patch.setattr(Packed, "of", classmethod(by_flash))
        patch.setattr(attention, "upload", lambda tensor, to: tensor.to(to))  # there is no stream to send it on
        for module in (segments, kept, moments):
            patch.setattr(module, "all_kept", lambda _: False)  # as on a GPU
        patch.setattr(FakeTensor, "is_cuda", True, raising=False)
        patch.setattr(dist, "broadcast", lambda *_, **__: None)  # it asks the GPU of a tensor how old it is
        # The only number that an update reads: whether the gradient's norm is finite.
        patch.setattr(FakeTensor, "__float__", lambda _: 1.0, raising=False)
        return Fsdp2().start(settings, _last(settings))

    @contextmanager
    def _meshes(self, settings: LearnerSettings) -> Iterator[tuple[DeviceMesh, Context | None, TensorRanks | None]]:
        """Of the last of the ranks that share a row, which has no prompt. Fake tensors would not let them be made."""
        dist.init_process_group("fake", rank=_last(settings), world_size=settings.ranks, store=FakeStore())
        names = ("replicate", "shard", "tensor")
        sizes = (settings.replicate, settings.ranks // settings.replicate // settings.tensor, settings.tensor)
        try:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            own = mesh[names[0 if settings.replicate > 1 else 1 : 2]]
            yield own, context_of(settings, 60.0), tensor_of(settings, 60.0)
        finally:
            dist.destroy_process_group()


def _last(settings: LearnerSettings) -> int:
    """Of the ranks that compute a row together."""
    return settings.context * settings.tensor - 1

"""A learner rank on a GPU that is not there: torch's fake tensors have shapes and no numbers, its tracker counts them.

The rank is the real one, made by the backend's own builder, and so is its update, with what rests in host memory
meanwhile; ranks beside it are played by torch's fake process group. What a GPU would do otherwise than a CPU is said
here: attention by one variable-length call, and the chunk of logits. The pretended GPU is torch's CPU to torch, which
has its streams, and host memory is a GPU's that nobody counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory.owned import PASSING, owned
from benchmarks.memory.rows import in_one_row
from rljob_trainer.algorithms import kept, moments, segments
from rljob_trainer.learner import attention, lora, residence
from rljob_trainer.learner import rank as rank_module
from rljob_trainer.learner.attention import ATTENTION, Packed
from rljob_trainer.learner.backends.fsdp2 import Fsdp2, build
from rljob_trainer.learner.backends.fsdp2.mesh import context_of, tensor_of
from rljob_trainer.learner.context import Context
from rljob_trainer.learner.gradients import Place
from rljob_trainer.learner.models import Critic, Policy
from rljob_trainer.learner.moves import Resting
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.tensor import TensorRanks
from rljob_trainer.learner.trained import Trained
from rljob_trainer.models import soft_capping

_GPU, _HOST = torch.device("cpu"), torch.device("cuda", 0)
"""What stands for them."""


class _UpdatedError(Exception):
    """An update has come to its end."""


class _Unseen:
    """``Untouched`` reads numbers, which fake tensors have not got."""

    def __init__(self, *_: object) -> None: ...

    def check(self, _: Sequence[Trained]) -> None: ...

    def updated(self, *_: object) -> list[str]:
        """After the last step. What comes then reads numbers, and moves parameters that torch's tracker holds."""
        raise _UpdatedError


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes on the pretended GPU."""

    state: int
    """Between two updates: weights, moments, a reference, as far as they don't rest in host memory."""
    peak: int
    """At the fullest moment of an update."""
    parts: Mapping[str, int]
    """Of that moment: what the rank keeps by the memory plan's names (``owned.py``), and the rest as ``PASSING``."""


_LOOK = 1.01


class _Tracker(MemTracker):
    """Keeps the device's peak alone, not that of each module besides: that takes time by the square of the layers."""

    _rank: rank_module.LearnerRank | None = None
    _kept: Mapping[str, int] = {}
    _looked_at = 0

    def look_at(self, rank: rank_module.LearnerRank) -> None:
        """From now on the tracker asks at peaks whose they are."""
        self._rank = rank

    @property
    def parts(self) -> dict[str, int]:
        """Whose the bytes are at the peak. What is kept was looked at when the peak had been reached to a percent: a
        look takes a tenth of a second, and of new peaks there are thousands."""
        return {**self._kept, PASSING: _bytes(self, "peak") - sum(self._kept.values())}

    def begin(self) -> int:
        """The bytes that are there now, from which on the peak counts: a model comes onto a real GPU cut up, and onto
        this one as a whole."""
        self._peak_mem.clear()
        return _bytes(self, "current")

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor not in types and args and isinstance(args[0], FakeTensor):
            # Half of what comes by asks a tensor for its device or makes a view, and neither takes memory.
            if func is torch.ops.prim.device.default:
                return args[0].device
            if func.is_view:
                return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        # Its hooks tell gradients by their kind, and a frozen parameter cannot have one.
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def _update_peak_stats(self, peak_state: object) -> None:
        now = self._curr_mem_snap[_GPU]
        if now["Total"] > self._peak_mem.get(_GPU, 0):
            self._peak_mem[_GPU] = now["Total"]
            self._peak_mem_snap[_GPU] = dict(now)
            if self._rank is not None and now["Total"] > _LOOK * self._looked_at:
                self._looked_at = now["Total"]
                self._kept = owned(self._rank, _GPU)


class PretendGpu:
    """Counts the memory of an update of one rank among many."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def scoring_peak(self, config: dict[str, Any], settings: LearnerSettings, batch: SequenceBatch) -> int:
        """Bytes at the fullest moment of scoring a row of the whole ``batch`` by the actor."""
        settings = replace(settings, model_path=Path("nowhere"), device="cpu")
        with self._meshes(settings) as meshes, FakeTensorMode(allow_non_fake_inputs=True):
            tracker = _Tracker()
            with tracker:
                rank = self._rank(config, settings, tracker, *meshes)
                tracker.begin()
                share = in_one_row(batch)
                policy = rank.actor.module
                place = Place(
                    rank.device,
                    settings.compute_dtype,
                    outputs_only=policy.outputs_only,
                    soft_capped=policy.soft_capped,
                )
                _, row = place.row(share, share.micro_batches[0][0])
                with torch.no_grad():
                    policy(row, 1.0)
            return _bytes(tracker, "peak")

    def update(
        self,
        config: dict[str, Any],
        settings: LearnerSettings,
        batch: SequenceBatch,
        passes: int = 2,
        critic: dict[str, Any] | None = None,
    ) -> Counted:
        """Of an update with one optimizer step, of ``passes`` rows, each of them the whole ``batch``. ``critic``: the
        configuration of a critic that starts from another model."""
        settings = replace(settings, model_path=Path("nowhere"), device="cpu")
        with self._meshes(settings) as meshes, FakeTensorMode(allow_non_fake_inputs=True):
            tracker = _Tracker()
            with tracker:
                rank = self._rank(config, settings, tracker, *meshes, critic=critic)
                share = in_one_row(batch)
                share.micro_batches[0] *= passes
                state = tracker.begin()
                tracker.look_at(rank)
                with suppress(_UpdatedError):
                    rank.update(share, LossSettings(), UpdateRequest(update_critic=rank.critic is not None))
            return Counted(state, _bytes(tracker, "peak"), tracker.parts)

    def _rank(
        self,
        config: dict[str, Any],
        settings: LearnerSettings,
        tracker: MemTracker,
        mesh: DeviceMesh,
        context: Context | None,
        tensor: TensorRanks | None,
        critic: dict[str, Any] | None = None,
    ) -> rank_module.LearnerRank:
        def load(dtype: torch.dtype, described: dict[str, Any]) -> Any:
            made = AutoConfig.for_model(
                described["model_type"], **{name: value for name, value in described.items() if name != "model_type"}
            )
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=ATTENTION)
            model.config.use_cache = False
            return model.eval()

        packed_of = Packed.of.__func__  # type: ignore[attr-defined]

        def by_flash(cls: type[Packed], row: Any, device: torch.device, dtype: torch.dtype, **options: Any) -> Packed:
            pretended = device if options.get("soft_capped") else torch.device("cuda")
            packed: Packed = packed_of(cls, row, pretended, dtype, **options)
            for part in (packed, packed.last):
                if part is not None and part.varlen is not None:
                    part.varlen = part.varlen.to(device)
                if part is not None and part.rows is not None:
                    part.rows = part.rows.to(device)
            return packed

        patch = self._patch
        patch.setattr(build, "load_policy", lambda *_, dtype, chunk, **__: Policy(load(dtype, config), chunk, tensor))
        patch.setattr(build, "load_critic", lambda *_, dtype, **__: Critic(load(dtype, critic or config)))
        patch.setattr(lora, "base_digest", lambda _: "0" * 64)
        patch.setattr(build, "FolderWeights", lambda _: None)  # the weights are there, without numbers
        patch.setattr(build, "join", lambda *_: mesh)
        patch.setattr(build, "context_of", lambda *_: context)
        patch.setattr(build, "tensor_of", lambda *_: tensor)
        patch.setattr(build.export, "stored_dtype", lambda _: torch.bfloat16)
        patch.setattr(rank_module, "Untouched", _Unseen)
        patch.setattr(rank_module.ExpertLoads, "_note", lambda *_: None)  # it counts numbers
        patch.setattr(Packed, "of", classmethod(by_flash))
        patch.setattr(attention, "upload", lambda tensor, to: tensor.to(to))  # there is no stream to send it on
        patch.setattr(soft_capping, "_SCORES", soft_capping._DEVICE_SCORES)
        for module in (segments, kept, moments):
            patch.setattr(module, "all_kept", lambda _: False)  # as on a GPU
        # What rests is let go of on the device, and comes back as it went.
        patch.setattr(residence, "_HOST", _HOST)
        patch.setattr(Resting, "moved", lambda _, name, tensors, device: [tensor.to(device) for tensor in tensors])
        patch.setattr(nn.Module, "_apply", _applied)
        # The tracker tells one pass from the next by this, and all that is read of a fake number is its shape.
        patch.setattr(rank_module.GivingUp, "check", lambda _: tracker.reset_mod_stats())
        patch.setattr(rank_module, "_go_on", tracker.reset_mod_stats)
        patch.setattr(
            FakeTensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape), dtype=np.float32), raising=False
        )
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


_apply = nn.Module._apply


def _applied(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``, which cannot put what it makes of a plain fake parameter in the place of that."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return _apply(module, change, recurse)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a matrix may stand in two places
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
            part.register_parameter(name, made[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, change(buffer))
    return module


def _bytes(tracker: MemTracker, when: str) -> int:
    return int(tracker.get_tracker_snapshot(when)[_GPU]["Total"])


def _last(settings: LearnerSettings) -> int:
    """Of the ranks that compute a row together."""
    return settings.context * settings.tensor - 1

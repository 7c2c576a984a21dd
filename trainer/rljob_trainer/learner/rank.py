"""The work of one rank: forward passes, losses, optimizer steps on its share of the sequences.

A plain object that knows torch.distributed but not Ray: ``group.py`` puts one into each actor. Every method that
touches a model is called on all ranks at once, with shares that have equal numbers of micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rljob_trainer.algorithms import PolicyInputs, Segments, actor_loss, critic_loss
from rljob_trainer.learner import export, parallel, state
from rljob_trainer.learner.models import PackedRow, checkpoint_activations, load_critic, load_policy
from rljob_trainer.learner.packing import Row, build_row
from rljob_trainer.learner.protocol import Int64Array, LossSettings
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.trained import Trained
from rljob_trainer.learner.work import RankReport, Share, StepReport
from rljob_trainer.samples import FloatArray

_log = logging.getLogger(__name__)

Sums = dict[str, torch.Tensor]


class LearnerRank:
    """One rank's models and what is done with them."""

    def __init__(
        self, settings: LearnerSettings, rank: int = 0, address: str = "", timeout_seconds: float = 1800.0
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.device = torch.device(settings.device)
        self.attachments: dict[str, Any] = {}
        """Objects of others that live beside the models (weight publication, a colocated engine)."""
        self._dtype = settings.compute_dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.manual_seed(settings.seed)
        self.mesh = parallel.join(settings, rank, address, timeout_seconds)

        policy = load_policy(
            settings.model_path,
            dtype=torch.float32,
            chunk=settings.log_prob_chunk_tokens,
            trust_remote_code=settings.trust_remote_code,
        )
        self._policy = self._place(policy, self._dtype)
        self.actor = Trained(
            "actor", self._policy, settings.actor, total_updates=settings.total_updates, mesh=self.mesh
        )
        self.critic: Trained | None = None
        if settings.critic is not None:
            critic = load_critic(settings.model_path, dtype=torch.float32, trust_remote_code=settings.trust_remote_code)
            self.critic = Trained(
                "critic",
                self._place(critic, self._dtype),
                settings.critic,
                total_updates=settings.total_updates,
                mesh=self.mesh,
            )
        self._reference = None
        if settings.reference:
            frozen = load_policy(
                settings.model_path,
                dtype=self._dtype,
                chunk=settings.log_prob_chunk_tokens,
                trust_remote_code=settings.trust_remote_code,
            )
            self._reference = self._place(frozen.requires_grad_(False), torch.float32)
        # What is drawn from here on (nothing does today) differs between ranks.
        torch.manual_seed(settings.seed * 65537 + rank)

    def _place(self, module: Any, compute: torch.dtype) -> Any:
        """Checkpointing, sharding, device."""
        if self.settings.activation_checkpointing:
            checkpoint_activations(module.layers)
        parallel.shard(module, module.layers, self.mesh, compute)
        return module.to(self.device)

    @property
    def actor_model(self) -> PreTrainedModel:
        """The live language model, for an engine in the same process."""
        model: PreTrainedModel = self._policy.language_model
        return model

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self,
        share: Share,
        temperature: float,
        *,
        log_probs: bool = False,
        entropy: bool = False,
        sum_squared_probs: bool = False,
        reference: bool = False,
        values: bool = False,
    ) -> dict[str, FloatArray]:
        """The streams asked for, in the order of the share's micro-batches, under ``ScoreResult``'s names."""
        if reference and self._reference is None:
            raise ValueError("reference log-probs were asked for, but the job keeps no reference (algorithm.kl is off)")
        if values and self.critic is None:
            raise ValueError("values were asked for, but the job has no critic (algorithm.advantage.estimator)")
        parts: dict[str, list[torch.Tensor]] = {}

        def keep(name: str, stream: torch.Tensor | None) -> None:
            assert stream is not None
            parts.setdefault(name, []).append(stream.float())

        for indices in (m for mini_batch in share.micro_batches for m in mini_batch):
            _, packed = self._row(share, indices, final=values)
            if log_probs or entropy or sum_squared_probs:
                own, spread, squared = self._policy(packed, temperature, sum_squared_probs)
                for name, wanted, stream in (
                    ("log_probs", log_probs, own),
                    ("entropy", entropy, spread),
                    ("sum_squared_probs", sum_squared_probs, squared),
                ):
                    if wanted:
                        keep(name, stream)
            if self._reference is not None and reference:
                keep("ref_log_probs", self._reference(packed, temperature)[0])
            if self.critic is not None and values:
                before, after = self.critic.module(packed)
                keep("values", before)
                keep("final_values", after)
        return {name: torch.cat(streams).cpu().numpy() for name, streams in parts.items()}

    def _row(self, share: Share, indices: Int64Array, *, final: bool = False) -> tuple[Row, PackedRow]:
        row = build_row(share.lengths, indices, final=final)
        return row, PackedRow.of(row, share.batch.token_ids, self.device, self._dtype)

    # --- training -----------------------------------------------------------------------------------------------------

    def update(
        self, share: Share, loss: LossSettings, *, update_actor: bool = True, update_critic: bool = False
    ) -> RankReport:
        """One optimizer step of each model per mini-batch, the critic's first."""
        if update_critic and self.critic is None:
            raise ValueError("an update of the critic was asked for, but the job has none")
        work: list[tuple[Trained, Callable[..., Sums]]] = []
        if update_critic and self.critic is not None:
            work.append((self.critic, self._critic_gradient))
        if update_actor:
            work.append((self.actor, self._actor_gradient))
        report = RankReport([], {trained.name: trained.rate for trained, _ in work})
        sums: list[Sums] = []
        for number in range(len(share.micro_batches)):
            for trained, gradient in work:
                sums.append(gradient(share, number, loss))
                outcome = trained.step()
                if outcome.problem is not None:
                    _log.warning("%s, mini-batch %d: %s; step skipped", trained.name, number, outcome.problem)
                report.steps.append(StepReport(trained.name, number, outcome.grad_norm, {}, outcome.problem))
        for trained, _ in work:
            trained.updates += 1
        for step, values in zip(report.steps, _on_host(sums), strict=True):
            step.sums = values
        return report

    def _actor_gradient(self, share: Share, number: int, loss: LossSettings) -> Sums:
        """Adds the gradient of mini-batch ``number`` to the actor's parameters; returns the summed metrics."""
        totals: Sums = {}
        for row, packed, inputs in self._micro_batches(share, number):
            log_probs, entropy, _ = self._policy(packed, loss.temperature)
            if not len(row.stream):
                _connected_zero(log_probs).backward()
                continue
            result = actor_loss(
                PolicyInputs(
                    log_probs=log_probs,
                    advantages=inputs("advantages", needed=True),
                    mask=inputs("mask", needed=True),
                    segments=self._segments(row),
                    old_log_probs=inputs("old_log_probs"),
                    rollout_log_probs=inputs("rollout_log_probs"),
                    ref_log_probs=inputs("ref_log_probs") if loss.kl_kind is not None else None,
                    weights=inputs("weights"),
                    entropy=entropy if loss.entropy_coefficient != 0.0 else entropy.detach(),
                ),
                loss,
                share.counts[number],
            )
            result.loss.backward()
            _add(totals, result.metrics)
        return totals

    def _critic_gradient(self, share: Share, number: int, loss: LossSettings) -> Sums:
        """The same for the critic, with the sums that its explained variance is made of."""
        assert self.critic is not None
        totals: Sums = {}
        for row, packed, inputs in self._micro_batches(share, number):
            values, _ = self.critic.module(packed)
            if not len(row.stream):
                _connected_zero(values).backward()
                continue
            returns, mask = inputs("returns", needed=True), inputs("mask", needed=True)
            old = inputs("values") if loss.value_clip is not None else None
            result = critic_loss(values, returns, mask, self._segments(row), loss, share.counts[number], old)
            result.loss.backward()
            target = torch.where(mask, returns, 0).double()
            error = target - torch.where(mask, values.detach(), 0).double()
            moments = {
                "moment/count": mask.sum().double(),
                "moment/return": target.sum(),
                "moment/return_squared": target.square().sum(),
                "moment/error": error.sum(),
                "moment/error_squared": error.square().sum(),
            }
            _add(totals, {**result.metrics, **moments})
        return totals

    def _micro_batches(self, share: Share, number: int) -> Iterator[tuple[Row, PackedRow, Callable[..., Any]]]:
        """The rows of a mini-batch, each with a function that gives a stream of its tokens by name."""
        for indices in share.micro_batches[number]:
            row, packed = self._row(share, indices)

            def stream(name: str, *, needed: bool = False, row: Row = row) -> torch.Tensor | None:
                values = getattr(share.batch, name)
                if values is None:
                    if needed:
                        raise ValueError(f"the update needs the stream {name!r}, which the batch lacks")
                    return None
                return torch.from_numpy(values[row.stream]).to(self.device, non_blocking=True)

            yield row, packed, stream

    def _segments(self, row: Row) -> Segments:
        lengths = np.diff(row.offsets)
        return Segments(torch.from_numpy(row.offsets).to(self.device), int(row.offsets[-1]), int(lengths.max()))

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> list[Trained]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def save(self, folder: Path) -> None:
        """Writes this rank's shards into an existing folder. Raises ``CheckpointError``."""
        state.save(folder, self._trained, self.rank, self.settings.ranks)

    def load(self, folder: Path) -> None:
        """Reads a saved state, whatever the number of ranks that wrote it. Raises ``CheckpointError``."""
        state.load(folder, self._trained, self.rank, self.settings.ranks)

    def export(self, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder, in the dtype of the folder it came from."""
        export.write_folder(folder, self.settings.model_path, self._policy.published(), writer=self.rank == 0)

    def named_parameters_for_publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(Hugging Face name, full tensor)`` in the compute dtype, gathered one at a time.

        All ranks must iterate in step. A model that is not sharded gives its live tensors, without a copy. A shared
        embedding comes once.
        """
        for name, parameter in self._policy.published():
            yield name, parallel.full(parameter, self._dtype)

    # --- memory -------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Frees the device for an engine: models and optimizer state go to host memory. Nothing happens on a CPU."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Takes everything back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        for trained in self._trained:
            trained.move(device)
        if self._reference is not None:
            self._reference.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leaves the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _connected_zero(stream: torch.Tensor) -> torch.Tensor:
    """A loss of 0 that still runs the backward pass, and with it the collectives that the other ranks wait for."""
    return stream.sum() * 0.0


def _add(totals: Sums, more: Sums) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def _on_host(sums: list[Sums]) -> list[dict[str, float]]:
    """All metrics of an update in one transfer."""
    flat = [value.double() for step in sums for value in step.values()]
    values = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: next(values) for name in step} for step in sums]

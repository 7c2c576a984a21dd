"""The work of one rank: forward passes, losses, optimizer steps on its data index's share of the sequences.

A plain object that knows torch.distributed but not Ray: ``actor.py`` puts one into each process. It is a
``BackendRank`` for every backend whose models are modules with parameters, however these are cut up and spread: the
backend hands them over as ``SpreadModels``. Every method that touches a model is called on all ranks at once, with
shares that have equal numbers of micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rljob_trainer.errors import LearnerError, StepGivenUpError
from rljob_trainer.learner import export, published, routing_replay, seals, state
from rljob_trainer.learner.anchor import Anchor
from rljob_trainer.learner.backend import Attachments, Placement, RowRules
from rljob_trainer.learner.context import Context
from rljob_trainer.learner.expert_loads import ExpertLoads
from rljob_trainer.learner.giving_up import GivingUp
from rljob_trainer.learner.gradients import (
    ActorGradient,
    CriticGradient,
    MicroReport,
    MiniBatchReport,
    Place,
    Sums,
    on_host,
)
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.models import Critic, PackedRow, Policy
from rljob_trainer.learner.moves import ModuleMoves
from rljob_trainer.learner.optim import StepOutcome
from rljob_trainer.learner.passes import Passes, PassJob
from rljob_trainer.learner.protocol import ACTOR_ALONE, LearnerFacts, LossSettings, ScoreRequest, UpdateRequest
from rljob_trainer.learner.reference import Reference, WithoutAdapter
from rljob_trainer.learner.residence import Residence
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.trained import Trained
from rljob_trainer.learner.untouched import Untouched
from rljob_trainer.learner.usage import Meter
from rljob_trainer.learner.work import RankReport, RankScores, Share, StepReport
from rljob_trainer.weights import adapters
from rljob_trainer.weights.blocks import lay_out
from rljob_trainer.weights.plan import Bucket
from rljob_trainer.weights.shards import Shard

if TYPE_CHECKING:
    from rljob_trainer.learner.lora import Adapter

Streams = dict[str, torch.Tensor]

_log = logging.getLogger(__name__)


def _go_on() -> None:
    """What there is to check when a step cannot be given up any more."""


@dataclass(frozen=True, slots=True)
class SpreadModels:
    """What a backend hands to a rank: modules that are on their device and cut up as the backend does it."""

    actor: Policy
    critic: Critic | None
    reference: Policy | WithoutAdapter | None
    """Frozen."""
    layout: Layout
    """How the parameters of all three are spread."""
    placement: Placement
    rules: RowRules
    device: torch.device
    facts: LearnerFacts
    """Of whole models."""
    passes: Passes
    live_model: PreTrainedModel | None
    """The actor, if this rank has all of it as transformers made it."""
    adapter: Adapter | None = None
    """What is trained of actor and critic; None: all of them."""
    context: Context | None = None
    """The ranks that compute every row together, if any do."""


class LearnerRank:
    """One rank's models and what is done with them."""

    def __init__(self, settings: LearnerSettings, rank: int, models: SpreadModels) -> None:
        """In every rank's process at once, after the process group was joined."""
        self.settings = settings
        self.rank = rank
        self.device = models.device
        self.attachments = Attachments()
        """Objects of others that live beside the models (weight publication, a colocated engine)."""
        self.giving_up = GivingUp(settings.ranks)
        self.version: int | None = 0
        """The policy version that the actor's weights are, at first the folder's. None since an update of them began,
        or others were read, until ``call_present`` gives them a number."""
        self.live_model = models.live_model
        self._facts, self._passes, self._layout = models.facts, models.passes, models.layout
        self._dtype = settings.compute_dtype
        self._meter = Meter(self.device)
        self._policy, self._reference = models.actor, models.reference
        self.actor = Trained(
            "actor",
            self._policy,
            settings.actor,
            total_updates=settings.actor_updates,
            layout=self._layout,
            adapter=models.adapter,
        )
        self.critic: Trained | None = None
        if models.critic is not None:
            assert settings.critic is not None
            self.critic = Trained(
                "critic",
                models.critic,
                settings.critic,
                total_updates=settings.total_updates,
                layout=self._layout,
                adapter=models.adapter,
            )
        self._anchor = Anchor(self._policy, self._layout)
        self._loads = ExpertLoads(self._policy, self._policy.experts)
        # Actor and reference are one network.
        self._place = Place(
            self.device,
            self._dtype,
            outputs_only=self._policy.outputs_only,
            soft_capped=self._policy.soft_capped,
            returns_outputs=models.placement.returns_outputs,
            length_multiple=models.rules.length_multiple,
            context=models.context,
        )
        self._critic_place = self._place
        if models.critic is not None:
            critic = models.critic
            self._critic_place = replace(self._place, outputs_only=critic.outputs_only, soft_capped=critic.soft_capped)
        # What is drawn from here on (nothing does today) differs between ranks.
        torch.manual_seed(settings.seed * 65537 + rank)
        parts: dict[str, Callable[[torch.device], object]] = {}
        for trained in self._trained:
            moves = ModuleMoves(trained.module, self._layout)
            parts |= {trained.name: moves, f"{trained.name} optimizer": trained.optimizer.move}
        apart = self._reference if isinstance(self._reference, Policy) else None
        if apart is not None:
            parts["reference"] = ModuleMoves(apart, self._layout)
        self._untouched = Untouched(rank, self._trained, apart, self._layout)
        self._residence = Residence(self.device, parts, idle_in_host=settings.offload)

    def facts(self) -> LearnerFacts:
        """The models' sizes as published (not this rank's part of them) and the device."""
        return self._facts

    # --- scoring ------------------------------------------------------------------------------------------------------

    def score(self, share: Share, request: ScoreRequest) -> RankScores:
        """The streams asked for, in the order of the share's micro-batches. Raises ``StepGivenUpError`` when asked to
        give up."""
        seals.check(share.batch, share.seals, self.rank)
        routing_replay.check(share.batch.routed_experts, self._policy, self._policy.experts)
        compares = request.reference or request.vocabulary_kl
        if compares and self._reference is None:
            raise ValueError("the reference was asked for, but the job keeps none (algorithm.kl is off)")
        if request.values and self.critic is None:
            raise ValueError("values were asked for, but the job has no critic (algorithm.advantage.estimator)")
        own, temperature = request.of_policy, request.temperature
        rows = self._rows(share, self._place, final=request.values)
        critic_rows = rows
        if request.values and self._critic_place != self._place:  # whose layers need other rows
            critic_rows = self._rows(share, self._critic_place, final=True)
        weights = self.anchored() if request.anchored else nullcontext()
        with self._residence.working("actor", *["reference"] * compares, *["critic"] * request.values), weights:
            against = self._compared() if request.vocabulary_kl else None
            plain_reference = request.reference and not request.vocabulary_kl
            work: list[tuple[Callable[[PackedRow], Streams], list[PackedRow]]] = [
                *[(partial(self._score_policy, temperature=temperature, wanted=own, against=against), rows)]
                * bool(own),
                *[(partial(self._score_reference, temperature=temperature), rows)] * plain_reference,
                *[(self._score_values, critic_rows)] * request.values,
            ]
            parts = self._passes.run(
                [partial(self._score_row, score, given[number]) for number in range(len(rows)) for score, given in work]
            )
        names = dict.fromkeys(name for part in parts for name in part)
        streams = {name: torch.cat([part[name] for part in parts if name in part]).cpu().numpy() for name in names}
        return RankScores(streams, self._meter.read())

    def _rows(self, share: Share, place: Place, *, final: bool) -> list[PackedRow]:
        """The rows of a share's micro-batches, in their order."""
        micro_batches = [indices for mini_batch in share.micro_batches for indices in mini_batch]
        return [place.row(share, indices, final=final)[1] for indices in micro_batches]

    def _compared(self) -> Reference:
        """The reference for the exact KL. A collective call."""
        assert self._reference is not None
        return Reference(self._reference, self._layout)

    def _score_row(self, score: Callable[[PackedRow], Streams], row: PackedRow) -> Streams:
        self.giving_up.check()
        return score(row)

    @torch.no_grad()
    def _score_policy(
        self, row: PackedRow, temperature: float, wanted: Sequence[str], against: Reference | None
    ) -> Streams:
        """The wanted streams of one micro-batch, in float32; with a reference to go ``against`` its log-probs too."""
        compared = None
        if against is not None:
            with self._meter.measure("reference"):
                compared = against(row, temperature)
        with self._meter.measure("old_log_probs"):
            out = self._policy(row, temperature, squares="sum_squared_probs" in wanted, reference=compared)
        streams = {name: getattr(out, name).float() for name in wanted}
        return streams | ({} if compared is None else {"ref_log_probs": compared.log_probs.float()})

    @torch.no_grad()
    def _score_reference(self, row: PackedRow, temperature: float) -> Streams:
        assert self._reference is not None
        with self._meter.measure("reference"):
            return {"ref_log_probs": self._reference(row.routed_anew(), temperature).log_probs.float()}

    @torch.no_grad()
    def _score_values(self, row: PackedRow) -> Streams:
        assert self.critic is not None
        with self._meter.measure("values"):
            values, finals = self.critic.module(row)
        assert finals is not None
        return {"values": values.float(), "final_values": finals.float()}

    def anchored(self) -> AbstractContextManager[None]:
        """Inside, the actor has the weights that the last update with ``keep_anchor`` began with."""
        return self._anchor.in_place()

    def call_present(self, version: int) -> None:
        """The actor's weights are policy version ``version`` from now on. Raises ``LearnerError`` for a number that is
        older than one it has given, or belongs to other weights."""
        kept = self._anchor.version
        if version < max(self.version or 0, kept or 0) or (version == kept and version != self.version):
            raise LearnerError(
                f"learner rank {self.rank} should publish its weights as version {version}, but has already used that "
                f"number or a later one ({self._held()}); please report this"
            )
        self.version = version

    def holding(self, version: int) -> AbstractContextManager[None]:
        """Inside, the actor has the weights of ``version``: its present ones, or those that the version began with.
        Raises ``LearnerError`` when it has neither: no other weights go out under that number."""
        if version == self.version:
            return nullcontext()
        if version == self._anchor.version:
            return self.anchored()
        raise LearnerError(
            f"learner rank {self.rank} was asked for the weights of version {version}, but has {self._held()}; "
            "nothing was sent; please report this"
        )

    def _held(self) -> str:
        """The versions of its weights, for messages."""
        present = "weights without a version" if self.version is None else f"version {self.version}"
        return present if self._anchor.version is None else f"{present}, kept version {self._anchor.version}"

    # --- training -----------------------------------------------------------------------------------------------------

    def update(self, share: Share, loss: LossSettings, request: UpdateRequest = ACTOR_ALONE) -> RankReport:
        """One optimizer step of each model per mini-batch, the critic's first.

        Raises ``StepGivenUpError`` when asked to give up before the first of them: then nothing has changed.
        """
        seals.check(share.batch, share.seals, self.rank)
        routing_replay.check(share.batch.routed_experts, self._policy, self._policy.experts)
        if request.update_critic and self.critic is None:
            raise ValueError("an update of the critic was asked for, but the job has none")
        work = [self.critic] if request.update_critic and self.critic is not None else []
        if request.update_actor:
            work.append(self.actor)
        groups = [work] if self._passes.together else [[trained] for trained in work]
        clocks, version = [trained.clock for trained in work], self.version
        for trained in work:
            trained.begin(continues=request.continues)
        try:
            return self._update(groups, share, loss, keep_anchor=request.keep_anchor)
        except StepGivenUpError:
            self.version = version
            for trained, clock in zip(work, clocks, strict=True):
                trained.clock = clock
                trained.module.zero_grad()
            self._passes.forget()
            self._loads.forget()
            raise

    def _update(
        self, groups: Sequence[Sequence[Trained]], share: Share, loss: LossSettings, *, keep_anchor: bool
    ) -> RankReport:
        """``groups`` of models, one after the other, in every mini-batch."""
        work = [trained for group in groups for trained in group]
        report = RankReport([], {trained.name: trained.rate for trained in work})
        sums: list[Sums] = []
        busy = [part for trained in work for part in (trained.name, f"{trained.name} optimizer")]
        with self._residence.working(*busy, *["reference"] * (loss.kl_kind == "full")):
            self._untouched.check(work)
            if keep_anchor:
                self._anchor.keep(self.version)
            if self.actor in work:
                self.version = None
            for number in range(len(share.micro_batches)):
                for group in groups:
                    check = _go_on if report.steps else self.giving_up.check
                    seen = self.gradient(group, share, number, loss, check)
                    check()
                    outcomes = self._passes.run([partial(self._step, trained) for trained in group])
                    for trained, told, outcome in zip(group, seen, outcomes, strict=True):
                        sums.append(told.sums)
                        if trained is self.actor and number == 0:
                            report.first_log_probs = torch.cat(told.log_probs).float().cpu().numpy()
                        if outcome.problem is not None:
                            _log.warning("%s, mini-batch %d: %s; step skipped", trained.name, number, outcome.problem)
                        report.steps.append(StepReport(trained.name, number, outcome.grad_norm, {}, outcome.problem))
            report.notes = self._untouched.updated(work, report.largest_norms())
            report.loads = self._loads.read()
        for step, values in zip(report.steps, on_host(sums), strict=True):
            step.sums = values
        report.usage = self._meter.read()
        return report

    def gradient(
        self,
        work: Sequence[Trained],
        share: Share,
        number: int,
        loss: LossSettings,
        check: Callable[[], None] = _go_on,
    ) -> list[MiniBatchReport]:
        """Adds the gradients of one mini-batch to the models' parameters. ``check`` is called before each pass."""
        micro_batches = share.micro_batches[number]
        jobs = [
            PassJob(trained, micro, trained.cost(share.lengths, indices))
            for trained in work
            for micro, indices in enumerate(micro_batches)
        ]
        gradients = {trained: self._pass(trained, share, number, loss) for trained in work}

        def one_pass(module: nn.Module, job: PassJob) -> MicroReport:
            check()
            with self._meter.measure(f"update_{job.trained.name}"):
                gradient: Callable[[Any, int], MicroReport] = gradients[job.trained]
                return gradient(module, job.micro)

        told = self._passes.gradients(jobs, one_pass)
        for trained in work:
            self._layout.add_up(parameter for _, parameter in trained.parameters())
            trained.optimizer.divide(gradients[trained].scale)
        return [MiniBatchReport.of([told[trained, m] for m in range(len(micro_batches))]) for trained in work]

    def _pass(self, trained: Trained, share: Share, number: int, loss: LossSettings) -> ActorGradient | CriticGradient:
        """What is done with each micro-batch of a mini-batch."""
        if trained is self.critic:
            return CriticGradient(share, number, loss, self._critic_place)
        # Drawn anew for every optimizer step, equal on all ranks, the same after a resume.
        step = trained.pull * 65_537 + number
        seed = ((self.settings.seed * 1_000_003 + trained.updates) * 1_000_003 + step) % (1 << 63)
        compared = self._compared() if loss.kl_kind == "full" and self._reference is not None else None
        return ActorGradient(self._policy, compared, share, number, loss, self._place, seed)

    def _step(self, trained: Trained) -> StepOutcome:
        with self._meter.measure(f"update_{trained.name}"):
            return trained.step()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> list[Trained]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @property
    def _owner(self) -> state.StateOwner:
        return state.StateOwner(self.settings.backend, self.rank, self.settings.ranks)

    def save(self, place: str | Path, belongs_to: str = "") -> None:
        """Writes this rank's shards into an existing folder, or to an address. Raises ``CheckpointError``."""
        # From wherever the parts rest: a colocated engine may have the device.
        state.save(place, self._trained, self._owner, belongs_to)

    def load(self, place: str | Path, belongs_to: str = "") -> None:
        """Reads a saved state, whatever the backend and the ranks that wrote it. Raises ``CheckpointError``."""
        self.version = self._anchor.version = None
        with self._residence.working():
            state.load(place, self._trained, self._owner, belongs_to)
            self._untouched.keep()

    def load_weights(self, place: str | Path) -> None:
        """Reads the actor's parameters of a saved state, whatever else it holds. Raises ``CheckpointError``."""
        self.version = self._anchor.version = None
        with self._residence.working():
            state.load_weights(place, self.actor)
            self._untouched.keep()

    def export(self, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder, in the dtype of the folder it came from; an adapter is merged."""
        export.write_folder(folder, self.settings.model_path, self._whole_model, self._layout, writer=self.rank == 0)

    def export_adapter(self, folder: Path, base: str) -> None:
        """Writes the actor's adapter as peft reads it. ``base`` is said to be the model that it belongs to."""
        from rljob_trainer.learner.lora import write_peft_folder

        assert self.actor.adapter is not None
        write_peft_folder(folder, self._policy, self._layout, self.actor.adapter, base=base, writer=self.rank == 0)

    def _whole_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor under Hugging Face names, laid out like its parameters; an adapter is merged."""
        if self.actor.adapter is None:
            return self._policy.published()
        from rljob_trainer.learner.lora import merged

        return merged(self._policy, self._layout)

    def _published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What engines are given, laid out like the parameters: the whole model, or the adapter and whose it is."""
        adapter, lora = self.actor.adapter, self.settings.lora
        if adapter is None or lora is None or lora.publish == "merged":
            yield from self._whole_model()
            return
        from rljob_trainer.learner.lora import matrices

        yield from matrices(self._policy, self._layout)
        for name, tensor in adapters.described(adapter.alpha, adapter.base_sha256):
            yield name, tensor.to(self.device)

    def _dtype_of(self, name: str) -> torch.dtype:
        """What a tensor is published in."""
        return adapters.DTYPES.get(name, self._dtype)

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of what is published, by Hugging Face names and in the compute dtype, one at a time. In
        float32 they share the parameters' memory. Nothing is gathered, but for what is small of an adapter."""
        self._layout.release(self._policy)
        for name, parameter in self._published():
            part = self._layout.local(parameter.detach()).to(self._dtype_of(name))
            shard = self._layout.shard(name, parameter, part)
            if name in adapters.DTYPES:  # all ranks have it
                shard = replace(shard, answers=self.rank == 0)
            yield from published.shards(shard)

    def named_parameters_for_publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(Hugging Face name, full tensor)`` in the compute dtype, gathered one at a time.

        All ranks must iterate in step. A model that is not sharded gives its live tensors, without a copy, but for
        those that an adapter is added to. A shared embedding comes once.
        """
        for name, whole in self._layout.gather(self._published(), self._dtype_of):
            yield from published.tensors(name, whole)

    def lay_out_for_publish(self, packs: Sequence[Bucket]) -> None:
        """Moves the actor's parameters together as the packs want them, where the live tensors are what is published.

        Aliases of them (a colocated engine's) would keep the old memory: not for a rank that shares its weights.
        """
        if self.live_model is None or self._dtype != torch.float32:
            return  # gathered or converted anew for every publication
        parameters = dict(self._policy.published())
        for pack in packs:
            # A stack of experts is one block already.
            if all(meta.name in parameters for meta in pack.tensors):
                lay_out([parameters[meta.name] for meta in pack.tensors], pack)

    # --- memory -------------------------------------------------------------------------------------------------------

    def rest(self, *, actor: bool = True) -> None:
        """Frees the device for an engine: models and optimizer state rest in host memory until ``wake``; what is
        scored meanwhile comes for that and goes again. Nothing happens on a CPU.

        With ``actor`` False the actor's parameters stay. Publication and ``save`` work either way.
        """
        self._residence.evict(actor=actor)

    def wake(self) -> None:
        """Takes back to the device what works there."""
        self._residence.settle()

    def close(self) -> None:
        """Leaves the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

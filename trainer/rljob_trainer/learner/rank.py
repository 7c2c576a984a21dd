"""The work of one rank: forward passes, losses, optimizer steps on its share of the sequences.

A plain object that knows torch.distributed but not Ray: ``group.py`` puts one into each actor. Every method that
touches a model is called on all ranks at once, with shares that have equal numbers of micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rljob_trainer.errors import LearnerError, StepGivenUpError
from rljob_trainer.learner import export, parallel, seals, state
from rljob_trainer.learner.anchor import Anchor
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
from rljob_trainer.learner.lanes import Twin, assign
from rljob_trainer.learner.models import PackedRow, checkpoint_activations, load_critic, load_policy, place
from rljob_trainer.learner.optim import StepOutcome
from rljob_trainer.learner.protocol import LearnerFacts, LossSettings
from rljob_trainer.learner.reference import Reference
from rljob_trainer.learner.residence import Residence
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.shards import like, local
from rljob_trainer.learner.side_by_side import SideBySide
from rljob_trainer.learner.trained import Trained
from rljob_trainer.learner.untouched import Untouched
from rljob_trainer.learner.usage import Meter
from rljob_trainer.learner.work import RankReport, RankScores, Share, StepReport
from rljob_trainer.weights.blocks import lay_out
from rljob_trainer.weights.plan import Bucket

Streams = dict[str, torch.Tensor]

_log = logging.getLogger(__name__)


def _go_on() -> None:
    """What there is to check when a step cannot be given up any more."""


class LearnerRank:
    """One rank's models and what is done with them."""

    def __init__(
        self, settings: LearnerSettings, rank: int = 0, address: str = "", timeout_seconds: float = 1800.0
    ) -> None:
        self.settings = settings
        self.rank = rank
        # Ray shows each rank its own GPU only.
        self.device = torch.device("cuda", 0) if settings.device == "cuda" else torch.device("cpu")
        self.attachments: dict[str, Any] = {}
        """Objects of others that live beside the models (weight publication, a colocated engine)."""
        self.giving_up = GivingUp(settings.ranks)
        self.version: int | None = 0
        """The policy version that the actor's weights are, at first the folder's. None since an update of them began,
        or others were read, until ``call_present`` gives them a number."""
        self._dtype = settings.compute_dtype
        self._meter = Meter(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.manual_seed(settings.seed)
        if settings.deterministic:
            # Not "warn only": flash attention's backward pass would stay as it is.
            torch.use_deterministic_algorithms(True)
            details: Any = torch.utils.deterministic
            details.fill_uninitialized_memory = False
        self.mesh = parallel.join(settings, rank, address, timeout_seconds)
        self._cores = SideBySide(allowed=settings.two_lanes)

        # Ranks that share a host each read the whole model before they cut it: in the files' own precision, if half.
        stored = torch.float32 if self.mesh is None else export.stored_dtype(settings.model_path)
        policy = load_policy(
            settings.model_path,
            dtype=stored,
            chunk=settings.log_prob_chunk_tokens,
            trust_remote_code=settings.trust_remote_code,
        )
        self._policy = self._prepare(policy, torch.float32, self._dtype)
        self.actor = Trained(
            "actor", self._policy, settings.actor, total_updates=settings.actor_updates, mesh=self.mesh
        )
        self.critic: Trained | None = None
        if settings.critic is not None:
            critic = load_critic(settings.model_path, dtype=stored, trust_remote_code=settings.trust_remote_code)
            self.critic = Trained(
                "critic",
                self._prepare(critic, torch.float32, self._dtype),
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
            self._reference = self._prepare(frozen.requires_grad_(False), self._dtype, self._dtype)
        self._twins: dict[str, Twin] = {}
        self._anchor = Anchor(self._policy)
        # All models are of one family.
        self._place = Place(self.device, self._dtype, outputs_only=policy.outputs_only)
        # What is drawn from here on (nothing does today) differs between ranks.
        torch.manual_seed(settings.seed * 65537 + rank)
        parts: dict[str, Callable[[torch.device], object]] = {}
        for trained in self._trained:
            parts |= {trained.name: trained.module.to, f"{trained.name} optimizer": trained.optimizer.move}
        if self._reference is not None:
            parts["reference"] = self._reference.to
        self._untouched = Untouched(rank, self._trained, self._reference)
        self._residence = Residence(self.device, parts, idle_in_host=settings.offload)

    def _prepare(self, module: Any, masters: torch.dtype, compute: torch.dtype) -> Any:
        """Checkpointing, sharding, device; parameters are kept in ``masters`` and computed with in ``compute``."""
        if self.settings.activation_checkpointing:
            checkpoint_activations(module.layers)
        parallel.shard(module, module.layers, self.mesh, compute)
        return place(module, self.device, masters)

    @property
    def actor_model(self) -> PreTrainedModel:
        """The live language model, for an engine in the same process."""
        model: PreTrainedModel = self._policy.language_model
        return model

    def facts(self) -> LearnerFacts:
        """The actor's size as published (not this rank's shard of it) and the device."""
        config = self.actor_model.config
        embedding: Any = self.actor_model.get_input_embeddings().weight
        shared = embedding is self.actor_model.get_output_embeddings().weight
        every = sum(parameter.numel() for parameter in self.actor_model.parameters())
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        return LearnerFacts(
            parameters=every - (0 if shared else embedding.numel()),
            layers=config.num_hidden_layers,
            width=heads * head,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        )

    # --- scoring ------------------------------------------------------------------------------------------------------

    def score(
        self,
        share: Share,
        temperature: float,
        *,
        log_probs: bool = False,
        entropy: bool = False,
        sum_squared_probs: bool = False,
        vocabulary_kl: bool = False,
        reference: bool = False,
        values: bool = False,
        anchored: bool = False,
    ) -> RankScores:
        """The streams asked for, in the order of the share's micro-batches. ``anchored``: the actor's with the weights
        that the last update with ``keep_anchor`` began with. Raises ``StepGivenUpError`` when asked to give up."""
        seals.check(share.batch, share.seals, self.rank)
        compares = reference or vocabulary_kl
        if compares and self._reference is None:
            raise ValueError("the reference was asked for, but the job keeps none (algorithm.kl is off)")
        if values and self.critic is None:
            raise ValueError("values were asked for, but the job has no critic (algorithm.advantage.estimator)")
        own = [
            *["log_probs"] * log_probs,
            *["entropy"] * entropy,
            *["sum_squared_probs"] * sum_squared_probs,
            *["vocabulary_kl"] * vocabulary_kl,
        ]
        rows = [
            self._place.row(share, indices, final=values)[1]
            for mini_batch in share.micro_batches
            for indices in mini_batch
        ]
        weights = self.anchored() if anchored else nullcontext()
        with self._residence.working("actor", *["reference"] * compares, *["critic"] * values), weights:
            against = Reference(self._reference) if vocabulary_kl and self._reference is not None else None
            work: list[Callable[[PackedRow], Streams]] = [
                *[partial(self._score_policy, temperature=temperature, wanted=own, against=against)] * bool(own),
                *[partial(self._score_reference, temperature=temperature)] * (reference and not vocabulary_kl),
                *[self._score_values] * values,
            ]
            parts = self._cores.run([partial(self._score_row, score, row) for row in rows for score in work])
        names = dict.fromkeys(name for part in parts for name in part)
        streams = {name: torch.cat([part[name] for part in parts if name in part]).cpu().numpy() for name in names}
        return RankScores(streams, self._meter.read())

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
            return {"ref_log_probs": self._reference(row, temperature).log_probs.float()}

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
                f"learner rank {self.rank} is to publish its weights as version {version}, but has given that number "
                f"or a later one to others already ({self._held()}); please report this"
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
        present = "present weights of no version" if self.version is None else f"version {self.version}"
        return present if self._anchor.version is None else f"{present}, kept version {self._anchor.version}"

    # --- training -----------------------------------------------------------------------------------------------------

    def update(
        self,
        share: Share,
        loss: LossSettings,
        *,
        update_actor: bool = True,
        update_critic: bool = False,
        continues: bool = False,
        keep_anchor: bool = False,
    ) -> RankReport:
        """One optimizer step of each model per mini-batch, the critic's first.

        Raises ``StepGivenUpError`` when asked to give up before the first of them: then nothing has changed.
        """
        seals.check(share.batch, share.seals, self.rank)
        if update_critic and self.critic is None:
            raise ValueError("an update of the critic was asked for, but the job has none")
        work = [self.critic] if update_critic and self.critic is not None else []
        if update_actor:
            work.append(self.actor)
        # Where models run in turn the first one's gradients are gone before the second one's are there.
        groups = [work] if self.settings.two_lanes else [[trained] for trained in work]
        clocks, version = [trained.clock for trained in work], self.version
        for trained in work:
            trained.begin(continues=continues)
        try:
            return self._update(groups, share, loss, keep_anchor=keep_anchor)
        except StepGivenUpError:
            self.version = version
            for trained, clock in zip(work, clocks, strict=True):
                trained.clock = clock
                trained.module.zero_grad()
            for twin in self._twins.values():
                twin.module.zero_grad()
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
                    outcomes = self._cores.run([partial(self._step, trained) for trained in group])
                    for trained, told, outcome in zip(group, seen, outcomes, strict=True):
                        sums.append(told.sums)
                        if trained is self.actor and number == 0:
                            report.first_log_probs = torch.cat(told.log_probs).float().cpu().numpy()
                        if outcome.problem is not None:
                            _log.warning("%s, mini-batch %d: %s; step skipped", trained.name, number, outcome.problem)
                        report.steps.append(StepReport(trained.name, number, outcome.grad_norm, {}, outcome.problem))
            report.notes = self._untouched.updated(work, report.largest_norms())
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
        jobs = [(trained, micro) for trained in work for micro in range(len(micro_batches))]
        costs = [trained.cost(share.lengths, micro_batches[micro]) for trained, micro in jobs]
        lanes = [[jobs[job] for job in lane] for lane in assign(costs, 2 if self.settings.two_lanes else 1)]
        passes = {trained: self._pass(trained, share, number, loss) for trained in work}
        # A model that runs in both lanes has a twin in the second.
        in_all = set(work).intersection(*({trained for trained, _ in lane} for lane in lanes))
        twins = {trained: self._twin(trained) for trained in work if len(lanes) > 1 and trained in in_all}

        def run(lane: int) -> dict[tuple[Trained, int], MicroReport]:
            told = {}
            for trained, micro in lanes[lane]:
                check()
                module: Any = twins[trained].module if lane and trained in twins else trained.module
                with self._meter.measure(f"update_{trained.name}"):
                    told[trained, micro] = passes[trained](module, micro)
            return told

        for twin in twins.values():
            twin.follow()
        told = {
            job: report
            for lane in self._cores.run([partial(run, lane) for lane in range(len(lanes))])
            for job, report in lane.items()
        }
        for twin in twins.values():
            twin.hand_over()
        for trained in work:
            trained.optimizer.divide(passes[trained].scale)
        return [MiniBatchReport.of([told[trained, m] for m in range(len(micro_batches))]) for trained in work]

    def _pass(self, trained: Trained, share: Share, number: int, loss: LossSettings) -> ActorGradient | CriticGradient:
        """What is done with each micro-batch of a mini-batch."""
        if trained is self.critic:
            return CriticGradient(share, number, loss, self._place)
        # Drawn anew for every optimizer step, equal on all ranks, the same after a resume.
        step = trained.pull * 65_537 + number
        seed = ((self.settings.seed * 1_000_003 + trained.updates) * 1_000_003 + step) % (1 << 63)
        return ActorGradient(self._policy, self._reference, share, number, loss, self._place, seed)

    def _twin(self, trained: Trained) -> Twin:
        if trained.name not in self._twins:
            self._twins[trained.name] = Twin(trained.module)
        return self._twins[trained.name]

    def _step(self, trained: Trained) -> StepOutcome:
        with self._meter.measure(f"update_{trained.name}"):
            return trained.step()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> list[Trained]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def save(self, place: str | Path, belongs_to: str = "") -> None:
        """Writes this rank's shards into an existing folder, or to an address. Raises ``CheckpointError``."""
        # From wherever the parts rest: a colocated engine may have the device.
        state.save(place, self._trained, self.rank, self.settings.ranks, belongs_to)

    def load(self, place: str | Path, belongs_to: str = "") -> None:
        """Reads a saved state, whatever the number of ranks that wrote it. Raises ``CheckpointError``."""
        self.version = self._anchor.version = None
        with self._residence.working():
            state.load(place, self._trained, self.rank, self.settings.ranks, belongs_to)
            self._untouched.keep()

    def load_weights(self, place: str | Path) -> None:
        """Reads the actor's parameters of a saved state, whatever else it holds. Raises ``CheckpointError``."""
        self.version = self._anchor.version = None
        with self._residence.working():
            state.load_weights(place, self.actor)
            self._untouched.keep()

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

    def named_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, not gathered and not for sending: what a publication is compared with."""
        for name, parameter in self._policy.published():
            value = parameter.detach()
            yield name, like(local(value).to(self._dtype), value)

    def lay_out_for_publish(self, packs: Sequence[Bucket]) -> None:
        """Moves the actor's parameters together as the packs want them, where the live tensors are what is published.

        Aliases of them (a colocated engine's) would keep the old memory: not for a rank that shares its weights.
        """
        if self.mesh is not None or self._dtype != torch.float32:
            return  # gathered or converted anew for every publication
        parameters = dict(self._policy.published())
        for pack in packs:
            lay_out([parameters[meta.name] for meta in pack.tensors], pack)

    # --- memory -------------------------------------------------------------------------------------------------------

    def offload(self, *, actor: bool = True) -> None:
        """Frees the device for an engine: models and optimizer state rest in host memory until ``onload``; what is
        scored meanwhile comes for that and goes again. Nothing happens on a CPU.

        With ``actor`` False the actor's parameters stay. Publication and ``save`` work either way.
        """
        self._residence.evict(actor=actor)

    def onload(self) -> None:
        """Takes back to the device what works there."""
        self._residence.settle()

    def close(self) -> None:
        """Leaves the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

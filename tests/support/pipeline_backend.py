"""A backend for tests whose ranks are not all alike: two stages of a pipeline for each data index.

    rank   0         1         2         3
    index  0         0         1         1
    stage  first     last      first     last
           embedding layers,   embedding layers,
           layers    norm,     layers    norm,
                     head                head

Only last stages have logits, so only they return outputs. A stage sends what it has computed on to the next one within
its forward pass, and the gradient back within the backward pass. Micro-batches come in pairs, rows in 16 tokens.
There is no critic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rljob_trainer.errors import JobFileError
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.layout import DividedLayout
from rljob_trainer.learner.models import PackedRow, Policy, PolicyStreams, load_policy, size_of
from rljob_trainer.learner.passes import OneByOne
from rljob_trainer.learner.process import meet, prepare
from rljob_trainer.learner.protocol import LearnerFacts
from rljob_trainer.learner.rank import LearnerRank, SpreadModels
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.weights.shards import Shard

STAGES = 2


class Pipeline:
    """A ``Backend``."""

    first_stage_reads = True
    """Whether the first stage is sent its sequences."""

    def placement(self, settings: LearnerSettings) -> tuple[Placement, ...]:
        if settings.ranks % STAGES:
            raise JobFileError(f"spec.trainer.replicas: a pipeline of {STAGES} stages has an even number of ranks")
        if settings.critic is not None:
            raise JobFileError("spec.algorithm.advantage.estimator: the pipeline trains no critic")
        return tuple(
            Placement(rank // STAGES, needs_inputs=last or self.first_stage_reads, returns_outputs=last)
            for rank in range(settings.ranks)
            for last in [rank % STAGES == STAGES - 1]
        )

    def rules(self, settings: LearnerSettings) -> RowRules:
        return RowRules(settings.micro_batch_tokens, settings.share_prefixes, count_multiple=2, length_multiple=16)

    def has_live_model(self, settings: LearnerSettings) -> bool:
        return False

    def start(self, settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> LearnerRank:
        device = prepare(settings)
        meet(settings, rank, address, timeout_seconds)
        stages = [dist.new_group(list(range(stage, settings.ranks, STAGES))) for stage in range(STAGES)]
        pipes = [dist.new_group([first, first + 1]) for first in range(0, settings.ranks, STAGES)]
        index, stage = divmod(rank, STAGES)
        whole = load_policy(settings.model_path, dtype=torch.float32, chunk=settings.log_prob_chunk_tokens)
        if whole.language_model.config.tie_word_embeddings:
            raise JobFileError("spec.model: the pipeline has no stage for a matrix that is input and output embedding")
        facts = LearnerFacts(size_of(whole), None, device.type)
        kind = LastStage if stage else FirstStage
        return LearnerRank(
            settings,
            rank,
            SpreadModels(
                actor=kind(whole, neighbour=rank ^ 1, rows_from_behind=not self.first_stage_reads),
                critic=None,
                reference=None,
                layout=self.layout(stages[stage], pipes[index]),
                placement=self.placement(settings)[rank],
                rules=self.rules(settings),
                device=device,
                facts=facts,
                passes=OneByOne(),
                live_model=None,
            ),
        )

    def layout(self, alike: dist.ProcessGroup, pipe: dist.ProcessGroup) -> PipelineLayout:
        return PipelineLayout(alike, pipe)


class PipelineFedFromBehind(Pipeline):
    """The first stage gets its rows from the last one, as tensor parts get theirs from the first of them."""

    first_stage_reads = False


class PipelineLayout(DividedLayout):
    """Each stage has its parameters whole, and so has the same stage of the other data indices."""

    def __init__(self, alike: dist.ProcessGroup, pipe: dist.ProcessGroup) -> None:
        self._alike, self._pipe = alike, pipe

    def shard(self, name: str, parameter: torch.Tensor, part: torch.Tensor) -> Shard:
        return replace(super().shard(name, parameter, part), answers=dist.get_rank(self._alike) == 0)

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._alike)

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = super().squared_norm(gradients)
        dist.all_reduce(total, group=self._pipe)
        return total


class Elsewhere(nn.Module):
    """Stands where another stage has a layer, so that parameters keep their names."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x


class Stage(Policy):
    """The layers of one stage."""

    def __init__(self, whole: Policy, neighbour: int, rows_from_behind: bool) -> None:
        super().__init__(whole.language_model, whole.chunk)
        self.neighbour, self.rows_from_behind = neighbour, rows_from_behind
        layers: Any = self.language_model.base_model.layers
        half = len(layers) // STAGES
        for number in range(len(layers)):
            if (number < half) == self.predicts:
                layers[number] = Elsewhere()


class FirstStage(Stage):
    predicts = False

    def __init__(self, whole: Policy, neighbour: int, rows_from_behind: bool) -> None:
        super().__init__(whole, neighbour, rows_from_behind)
        body: Any = self.language_model
        body.base_model.norm, body.lm_head = Elsewhere(), Elsewhere()

    @property
    def output_parameters(self) -> int:
        return 0

    def forward(self, row: PackedRow, temperature: float, **_: Any) -> PolicyStreams:
        if self.rows_from_behind:
            told: list[Any] = [None]
            dist.recv_object_list(told, self.neighbour)
            (row,) = told
        sent = _Send.apply(self.hidden(row), self.neighbour)
        return PolicyStreams(sent, sent, sent, sent, None)


class LastStage(Stage):
    def __init__(self, whole: Policy, neighbour: int, rows_from_behind: bool) -> None:
        super().__init__(whole, neighbour, rows_from_behind)
        body: Any = self.language_model.base_model
        body.embed_tokens = Elsewhere()

    def hidden(self, row: PackedRow) -> torch.Tensor:
        if self.rows_from_behind:
            dist.send_object_list([row], self.neighbour)
        width = self.language_model.config.hidden_size
        anchor = torch.zeros(0, requires_grad=True)
        received = _Receive.apply(anchor, (row.token_ids.shape[1], width), self.neighbour)
        out = self.language_model.base_model(
            inputs_embeds=received[None],
            position_ids=row.positions,
            attention_mask=row.positions.new_empty(1, 1, 1, 1),
            use_cache=False,
            packed=row.attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


class _Send(torch.autograd.Function):
    """Hidden states to the next stage; their gradient comes back from there."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, neighbour: int) -> torch.Tensor:
        ctx.neighbour, ctx.shape = neighbour, hidden.shape
        dist.send(hidden.detach().contiguous(), neighbour)
        return hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = torch.empty(ctx.shape)
        dist.recv(gradient, ctx.neighbour)
        return gradient, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: tuple[int, ...], neighbour: int) -> torch.Tensor:
        ctx.neighbour = neighbour
        hidden = torch.empty(shape)
        dist.recv(hidden, neighbour)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.send(gradient.contiguous(), ctx.neighbour)
        return torch.zeros(0), None, None

"""What the learner is to the driver: token streams in, log-probs or metrics out.

The learner is blind to the algorithm. Advantages, corrections and masks arrive as per-token streams; how they become a
loss is said by ``LossSettings``. One call of ``update`` carries a whole step (all epochs and mini-batches).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_trainer.algorithms.correction import Correction
from rljob_trainer.episodes.tokens import BoolArray, ByteArray, FloatArray, IntArray

if TYPE_CHECKING:
    from rljob_trainer.learner.backend import BackendRank
    from rljob_trainer.learner.bundles import Bundles

P = ParamSpec("P")
T = TypeVar("T")

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """S sequences: token ids of prompt and response, and streams over the response tokens.

    ``token_ids [all]`` holds prompt + response of sequence 0, then of sequence 1, and so on.
    Streams are flat over *response* tokens only, ``[tokens]``, in the same order of sequences.
    """

    token_ids: IntArray
    prompt_lengths: Int64Array  # [S]
    response_lengths: Int64Array  # [S]
    mask: BoolArray  # [tokens] True: the model made this token and it is trained on
    advantages: FloatArray | None = None  # [tokens]
    returns: FloatArray | None = None  # [tokens], value targets
    values: FloatArray | None = None  # [tokens], V at sampling time (anchor of the value clip)
    old_log_probs: FloatArray | None = None  # [tokens] pi_old; None: the current policy's own, detached
    rollout_log_probs: FloatArray | None = None  # [tokens] pi_roll
    ref_log_probs: FloatArray | None = None  # [tokens] pi_ref
    weights: FloatArray | None = None  # [tokens] rollout-correction weights, multiply the per-token loss
    shares: FloatArray | None = None  # [tokens] what its sequence counts for where sequences are averaged; None: 1
    rollout_share: FloatArray | None = None  # [tokens] log pi_old = share x log pi_roll + the rest x log pi_theta
    routed_experts: ByteArray | None = None
    """``[all, layers, k]`` over *all* tokens, prompts too: the experts that the engine chose in its pass over each; one
    of them k times where that is not known. None: the actor's routers choose."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)


@dataclass(frozen=True, slots=True)
class LossSettings:
    """How a step's streams become a loss. Parameters are keyword arguments of the registered functions."""

    policy_loss: str = "ppoClip"
    policy_loss_params: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "tokenMean"
    aggregation_params: Mapping[str, Any] = field(default_factory=dict)
    kl_kind: str | None = None
    """KL of the current policy to the reference in the loss: k1, k2, k3, abs ...; None: off."""
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    value_clip: float | None = None
    temperature: float = 1.0
    correction: Correction | None = None
    """What corrects from pi_roll to the pi_old that ``SequenceBatch.rollout_share`` makes in the loss."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Which streams of a batch are wanted, and of which weights."""

    temperature: float = 1.0
    log_probs: bool = False
    entropy: bool = False
    sum_squared_probs: bool = False
    vocabulary_kl: bool = False
    reference: bool = False
    """The reference's log-probs."""
    values: bool = False
    """The critic's values, and those after the last tokens."""
    anchored: bool = False
    """The actor's streams with the weights that the last update with ``keep_anchor`` began with."""

    @property
    def of_policy(self) -> tuple[str, ...]:
        """The streams that the actor's forward pass gives, by their names in ``ScoreResult``."""
        wanted = {
            "log_probs": self.log_probs,
            "entropy": self.entropy,
            "sum_squared_probs": self.sum_squared_probs,
            "vocabulary_kl": self.vocabulary_kl,
        }
        return tuple(name for name, asked in wanted.items() if asked)

    @property
    def empty(self) -> bool:
        return not (self.of_policy or self.reference or self.values)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Which models an update moves, and what it belongs to."""

    update_actor: bool = True
    update_critic: bool = False
    continues: bool = False
    """It belongs to the policy version of the update before, so the learning rate is the same."""
    keep_anchor: bool = False
    """Keep a copy of the actor as it is before."""


ACTOR_ALONE = UpdateRequest()


@dataclass(slots=True)
class ScoreResult:
    """Streams over response tokens ``[tokens]``, in the order of the batch that was scored."""

    log_probs: FloatArray | None = None
    entropy: FloatArray | None = None
    sum_squared_probs: FloatArray | None = None
    """Sum over the vocabulary of the squared probabilities (the optimal token baseline needs it)."""
    ref_log_probs: FloatArray | None = None
    vocabulary_kl: FloatArray | None = None
    """The exact KL of the policy to the reference."""
    values: FloatArray | None = None
    final_values: FloatArray | None = None
    """[S] V at the position after the last response token: GAE's bootstrap for truncated responses."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Seconds of each stream and memory, under their public names."""


@dataclass(slots=True)
class UpdateResult:
    """Metrics of one step under their public names, averaged over its optimizer steps (skipped ones left out)."""

    metrics: dict[str, float]
    actor_steps: int
    critic_steps: int
    skipped: list[str] = field(default_factory=list)
    """One sentence for each optimizer step that was skipped (non-finite gradient of which model and mini-batch)."""
    first_log_probs: FloatArray | None = None
    """[tokens] of the actor before its first optimizer step, NaN for sequences outside the first mini-batch; None
    without an update of the actor."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what the update did not do as it should have."""
    grad_norm: float | None = None
    """Of the actor's gradients, the mean over its optimizer steps; None: none was taken."""
    entropy: float | None = None
    """Of the actor's distribution at the trained tokens, in nats; None: nobody asked for it, or no step was taken."""


@dataclass(frozen=True, slots=True)
class NetworkSize:
    """What the speed of a model is measured by."""

    parameters: int
    """Used for every token: without the input embedding (an embedding shared with the output counts once), and of a
    mixture of experts with as many experts as a token is sent to."""
    layers: int
    width: int
    """Heads times head dimension."""


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """What the speed of a learner is measured by: the sizes of what it trains, and its device."""

    actor: NetworkSize
    critic: NetworkSize | None
    """None: there is none."""
    device: str
    """As its driver calls it; ``cpu`` on CPUs."""


class Learner(Protocol):
    """The driver's handle of all trainer ranks. Every call is awaited; ranks work in lock-step inside."""

    async def score(self, batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        """The streams asked for, all from one pass over the batch."""
        ...

    async def update(
        self,
        batch: SequenceBatch,
        loss: LossSettings,
        mini_batches: Sequence[Sequence[int]],
        request: UpdateRequest = ACTOR_ALONE,
    ) -> UpdateResult:
        """One optimizer step of each model per entry of ``mini_batches`` (indices of sequences; epochs are
        repeated entries, in the order given)."""
        ...

    async def give_up(self) -> None:
        """Asks that the ``score`` or ``update`` that is under way (or comes) ends with ``StepGivenUpError``; one that
        has made its first optimizer step goes on to its end. To be followed by nothing but ``save`` and ``close``."""
        ...

    async def save(self, place: str | Path, belongs_to: str = "") -> None:
        """Writes model, optimizer, scheduler and random states, sharded, into an existing folder or to an address;
        and the run and step that they belong to, in words."""
        ...

    async def load(self, place: str | Path, belongs_to: str = "") -> None:
        """Reads what ``save`` wrote, also by another number of ranks or another backend.

        Raises ``CheckpointError``, also for a state that belongs to another run or step than is said.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder."""
        ...

    async def close(self) -> None:
        """Ends the ranks' processes."""
        ...


class RankedLearner(Learner, Protocol):
    """A learner as those see it who work beside its models: publication, colocated engines, the checks of both.

    They get here by ``learner.starting.start_learner``, and need not know what a rank is made of.
    """

    facts: LearnerFacts | None
    """What rank 0 said of its model and device at the start."""
    bundles: Bundles | None
    """Where the ranks live, if places were reserved."""
    call_seconds: float
    """What a single call may take."""
    dtype: str
    """What is computed in, and published."""
    has_live_model: bool
    """Whether a rank has the actor whole, so that an engine in its process can sample from the very weights."""

    @property
    def ranks(self) -> int:
        """How many there are; rank 0 sends what is published."""
        ...

    async def rest(self, *, actor: bool = True) -> None:
        """Frees the devices for colocated engines; ``actor=False`` leaves the actor's parameters where they are."""
        ...

    async def wake(self) -> None:
        """Takes the devices back."""
        ...

    async def run(
        self, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """``function(rank, *args)`` in every rank's process at once; the results by rank. It keeps to ``call_seconds``
        itself. Arguments go by position."""
        ...

    def run_at(
        self, rank: int, function: Callable[Concatenate[BackendRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Runs ``function`` in one rank's process, for what is no business of the others."""
        ...

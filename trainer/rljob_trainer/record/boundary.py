"""The driver's part of a checkpoint: where a run stands at a step's boundary, when nothing of the step is pending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rljob_trainer.errors import CheckpointError
from rljob_trainer.record.start_model import STATE, Description
from rljob_trainer.record.weights import Published


@dataclass(frozen=True, slots=True)
class Totals:
    """What has been done since the run began, over all its attempts."""

    step: int = 0
    version: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Of prompts and responses, of each sequence that was trained."""
    response_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A prompt that was handed out and is neither trained nor dropped: where it is in the data."""

    ordinal: int
    epoch: int
    source: str
    row: int
    deadline: int
    """The version in which it is to be trained at the latest."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Everything that a run goes on from but the learner's part, the ledger and the tokens of open groups."""

    run: str
    """The run's name over all its attempts: it binds the parts of a checkpoint together."""
    totals: Totals
    model: Description
    """Of the model that the run began with."""
    feed: Mapping[str, Any]
    """The position in the data."""
    open: tuple[OpenGroup, ...]
    groups_per_version: int
    """What the schedule of the open groups counts in."""
    training: Mapping[str, Any]
    """The state of ``TrainingStep``."""
    corpora: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the environment's tools look in, by their names."""
    weights: Published | None = None
    """As they were published at this boundary; None: nothing was."""
    unvalidated: dict[str, float] | None = None
    """The step's metrics as long as the validation is missing in them that is due here; what else becomes known of the
    step until its line is written is added to these very metrics. None: no validation is owed."""

    @property
    def owner(self) -> str:
        """In words, what the parts of its checkpoint belong to."""
        return f"run {self.run}, step {self.totals.step}"

    def to_state(self) -> dict[str, object]:
        """The boundary as a dictionary that JSON takes."""
        return {
            **asdict(self.totals),
            "run": self.run,
            STATE: self.model,
            "feed": dict(self.feed),
            "open": [[group.ordinal, group.epoch, group.source, group.row, group.deadline] for group in self.open],
            "groups_per_version": self.groups_per_version,
            "training": dict(self.training),
            "corpora": dict(self.corpora),
            "weights": None if self.weights is None else asdict(self.weights),
            "unvalidated": self.unvalidated,
        }

    def check_corpora(self, now: Mapping[str, str], place: str) -> None:
        """Raises ``CheckpointError`` when a tool looks in other passages than before; ``place``: the checkpoint's."""
        for name, digest in self.corpora.items():
            if now.get(name, digest) != digest:
                raise CheckpointError(
                    f"the corpus of the tool {name} has changed since checkpoint {place} was written "
                    f"(its digest was {digest} and is now {now[name]}). Restore the corpus, rename the tool, "
                    "or start a new run from the checkpoint's model"
                )

    @classmethod
    def of(cls, state: Mapping[str, Any], place: str) -> Boundary:
        """What ``to_state`` gave. Raises ``CheckpointError`` with the checkpoint's ``place``."""
        try:
            return cls(
                run=str(state["run"]),
                totals=Totals(**{field.name: state[field.name] for field in fields(Totals)}),
                model=state[STATE],
                feed=state["feed"],
                open=tuple(_open_group(*group) for group in state["open"]),
                groups_per_version=int(state["groups_per_version"]),
                training=state["training"],
                corpora={str(name): str(digest) for name, digest in state["corpora"].items()},
                weights=None if state["weights"] is None else Published(**state["weights"]),
                unvalidated=state["unvalidated"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {place} was written by another version: {error!r}") from error


def _open_group(ordinal: object, epoch: object, source: object, row: object, deadline: object) -> OpenGroup:
    numbers = [ordinal, epoch, row, deadline]
    if not all(type(number) is int for number in numbers) or not isinstance(source, str):
        raise TypeError(f"an open group that is {[ordinal, epoch, source, row, deadline]!r}")
    return OpenGroup(ordinal, epoch, source, row, deadline)  # type: ignore[arg-type]

"""Where a job names what it reads and where its state is kept: one list of fields, for everybody who checks, mounts,
rewrites or compares them.

A field is written as in the job file, without `spec.` in front; `[]` stands for the items of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

READ: Final = (
    "model.source",
    "model.tokenizer",
    "model.random.tokenizer.source",
    "data.train.source",
    "data.train.parts[].source",
    "data.validation[].source",
    "data.train.task.python",
    "data.train.parts[].task.python",
    "data.validation[].task.python",
    "reward.functions[].rewardModel.source",
    "rollout.environment.tools[].corpus.source",
    "judge.model.source",
    "algorithm.critic.model.source",
)
"""Fields that name a file (an interpreter's too), a folder, a hub's model or data set, or an address of a store."""
STATE: Final = ("checkpoint.uri", "restore.from")
"""Fields that name where a run's state is kept, or was."""


@dataclass(frozen=True, slots=True)
class NamedPlace:
    """A field of some job in which something is written."""

    field: str
    """Its entry in one of the lists above, such as ``data.validation[].source``."""
    path: str
    """Where it is in this job: ``spec.data.validation[0].source``."""
    value: str
    holder: Any
    """The map or the model that has the field."""
    name: str
    """The field's own name, the last part of it."""

    def rewrite(self, value: str) -> None:
        """Writes another value into a job that is plain data.

        Raises ``TypeError`` for a model, which is never changed.
        """
        if not isinstance(self.holder, MutableMapping):
            raise TypeError(f"{self.path} is a field of a model: rewrite the job's document()")
        self.holder[self.name] = value


def locations(spec: BaseModel | dict[str, Any], fields: Iterable[str]) -> Iterator[NamedPlace]:
    """Finds what a spec has in ``fields``, in their order. The spec is a model or plain data; a field that is absent in
    it, or holds no text, is passed over."""
    for field in fields:
        *way, name = field.split(".")
        for path, holder in _holders(spec, way, "spec"):
            value = _value(holder, name)
            if isinstance(value, str):
                yield NamedPlace(field, f"{path}.{name}", value, holder, name)


def place_in_schema(field: str) -> tuple[tuple[str, ...], str]:
    """The way to the section that has a field, as rules have it (``("spec", "data", "validation", "[]")``), and the
    field's own name."""
    *way, name = field.split(".")
    parts = [part for step in way for part in ((step.removesuffix("[]"), "[]") if step.endswith("[]") else (step,))]
    return ("spec", *parts), name


def _holders(value: Any, way: list[str], path: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if not way:
        yield path, value
        return
    name = way[0].removesuffix("[]")
    below, at = _value(value, name), f"{path}.{name}"
    if way[0] == name:
        yield from _holders(below, way[1:], at)
    elif isinstance(below, list | tuple):
        for index, item in enumerate(below):
            yield from _holders(item, way[1:], f"{at}[{index}]")


def _value(holder: Any, name: str) -> Any:
    """A field by the name that it has in the job file."""
    if isinstance(holder, BaseModel):
        fields = type(holder).model_fields
        return next((getattr(holder, own) for own, field in fields.items() if (field.alias or own) == name), None)
    return holder.get(name) if isinstance(holder, dict) else None

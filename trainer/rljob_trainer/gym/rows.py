"""Problems of reasoning-gym as rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.data.columns import Row
from rljob_trainer.gym.process import GymProcess, as_asked, gym_process, interpreter

if TYPE_CHECKING:
    from rljob_api.spec.data import TaskSpec

COLUMNS = ("question", "answer", "problem")


class GymRows:
    """The problems of a task on one side of the split, made when they are read. Any number of them costs nothing."""

    columns = COLUMNS

    def __init__(self, task: TaskSpec, *, held_out: bool, base: Path | None = None) -> None:
        """Raises ``JobFileError`` where the package is missing, ``WrongTaskError`` where it does not know the task."""
        self._task = as_asked(task)
        self._held_out = held_out
        self._process: GymProcess = gym_process(interpreter(task, base))
        self._process.check(**self._task)

    @property
    def made_by(self) -> str:
        """What decides which problems these are: a run does not go on with those of another version."""
        return self._process.describe()

    def __len__(self) -> int:
        return int(self._task["size"])

    def __getitem__(self, index: int) -> Row:
        """Raises as ``GymProcess.row``."""
        return self._process.row(self._task, index, held_out=self._held_out)

    def place(self, index: int) -> str:
        return f"task {self._task['name']} of reasoning-gym, problem {index}"

    def first_without(self, name: str) -> int | None:
        """None: all problems have the same columns."""
        return None

    def first_null(self, name: str) -> int | None:
        """None: a task either has answers or has none."""
        return None

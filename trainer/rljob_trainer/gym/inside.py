"""What runs beside the package reasoning-gym, in whichever interpreter has it: the standard library, and that package.

As a program (``python inside.py``) it makes problems: one JSON object a line on standard input, each answered by one on
standard output, until the input ends. Inside the sandbox it is a module, and its ``score`` is called for one answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import signal
import sys
import types
from collections import OrderedDict
from typing import Any

PROTOCOL = 1
HELD_OUT_ONE_IN = 10
MOST_DRAWS = 1000
"""Seeds that are tried for a question on the right side of the split: with one in ten, all miss once in 10**45."""
_NEXT_SEED = 15485863
"""A prime far larger than most sizes: the package adds a problem's index to its seed."""
_SEEDS = 2**31
_MOST_DATASETS = 64
_REFUSED = {"composite": "list its tasks as several parts with weights"}
_OWN = ("seed", "size")


class TaskError(Exception):
    """A task that there is not, or a configuration that it does not take."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.field, self.problem, self.remedy = field, problem, remedy


class _NoDrawing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for matplotlib, which cellpylib imports to draw. No task draws, and it takes most of the time that the
    import of the package takes, and a folder to write to."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("matplotlib", "mpl_toolkits"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        # A class, as which anything may be imported, and of which others may be made.
        module.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]


def imported() -> Any:
    """The package, without what draws. Raises ``ImportError``."""
    if "reasoning_gym" not in sys.modules and "matplotlib" not in sys.modules:
        sys.meta_path.insert(0, _NoDrawing())
    return importlib.import_module("reasoning_gym")


def described() -> dict[str, Any]:
    """Which package this is, and of which Python: both decide what a seed gives."""
    imported()
    version = importlib.metadata.version("reasoning_gym")
    return {"protocol": PROTOCOL, "version": version, "python": ".".join(map(str, sys.version_info[:2]))}


_datasets: OrderedDict[str, Any] = OrderedDict()


def dataset_of(name: str, config: dict[str, Any], seed: int, size: int) -> Any:
    """The package's data set. Raises ``TaskError``."""
    key = json.dumps([name, config, seed, size], sort_keys=True)
    if key in _datasets:
        _datasets.move_to_end(key)
        return _datasets[key]
    gym = imported()
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name in _REFUSED:
        raise TaskError("name", f"the task {name} is composed of other tasks", _REFUSED[name])
    if name not in known:
        raise TaskError(
            "name", f"reasoning-gym has no task {name!r}", _nearest(name, sorted(set(known) - set(_REFUSED)))
        )
    fields = sorted({field.name for field in dataclasses.fields(known[name][1])} - set(_OWN))
    for wrong in sorted(set(config) - set(fields)):
        if wrong in _OWN:
            raise TaskError("config", f"{wrong} is a field of the task itself", f"write it as task.{wrong}")
        raise TaskError("config", f"the task {name} has no setting {wrong!r}", _nearest(wrong, fields))
    try:
        made = gym.create_dataset(name, seed=seed, size=size, **config)
    except Exception as problem:  # noqa: BLE001  assertions, of configurations
        said = " ".join(str(problem).split()) or type(problem).__name__
        raise TaskError("config", f"the task {name} does not accept it: {said}", "correct config, or size") from None
    _datasets[key] = made
    while len(_datasets) > _MOST_DATASETS:
        _datasets.popitem(last=False)
    return made


def _nearest(wrong: str, names: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(wrong, names, 1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(names) or 'none'}"


def digest(question: str) -> str:
    """64 bits of a question in hexadecimal digits, the same everywhere."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_held_out(question: str) -> bool:
    """Whether a question belongs to validation (one in ten does)."""
    return int(digest(question), 16) % HELD_OUT_ONE_IN == 0


def problem_of(task: dict[str, Any], row: int, held_out: bool) -> dict[str, Any]:
    """The row's question, answer and origin. Raises ``TaskError`` where no question is on that side of the split."""
    for draw in range(MOST_DRAWS):
        seed = (task["seed"] + draw * _NEXT_SEED) % _SEEDS
        entry = dataset_of(task["name"], task["config"], seed, task["size"])[row]
        question, answer = entry["question"], entry["answer"]
        if is_held_out(question) == held_out:
            origin = {"name": task["name"], "config": task["config"], "size": task["size"], "seed": seed, "index": row}
            said = answer if answer is None or isinstance(answer, str) else str(answer)
            return {"question": question, "answer": said, "problem": {**origin, "digest": digest(question)}}
    side = "validation" if held_out else "training"
    raise TaskError(
        "config",
        f"none of {MOST_DRAWS} questions of the task {task['name']} belong to {side}: it has too few different ones",
        "widen the ranges in config; one in ten questions is held out for validation",
    )


def _answered(request: dict[str, Any]) -> Any:
    wanted = request["do"]
    if wanted == "describe":
        return described()
    if wanted == "check":
        dataset_of(**request["task"])
        return None
    if wanted == "row":
        return problem_of(request["task"], request["row"], request["held_out"])
    raise ValueError(f"there is no {wanted!r}")


def main() -> None:
    # The folder of this file is no place to look for modules.
    sys.path.pop(0)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the package prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        # A problem that takes for ever ends this process, also when nobody waits any more.
        signal.alarm(request["seconds"])
        try:
            answer = {"said": _answered(request)}
        except TaskError as wrong:
            answer = {"wrong": [wrong.field, wrong.problem, wrong.remedy]}
        except Exception as failed:  # noqa: BLE001  whatever the package raises
            answer = {"failed": f"{type(failed).__name__}: {failed}"}
        signal.alarm(0)
        answers.write(json.dumps({"number": request["number"], **answer}) + "\n")
        answers.flush()


def prepare(tasks: list[dict[str, Any]]) -> None:
    """Does what would make the first answers slow. Raises ``TaskError``."""
    imported()
    for task in tasks:
        dataset_of(**task)


def score() -> None:
    """Scores one answer: reads the problem's origin and the answer from standard input, writes two lines.

    ``MADE`` when there is the problem, before the answer is looked at: what goes wrong later is the answer's doing.
    Then the score, or what scoring raised. Both lines begin with a word that the asker has drawn, so that what an
    evaluated answer prints is no score; one that looks for the word in this process finds it.
    """
    request = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    word, origin = request["word"], request["problem"]
    dataset = dataset_of(origin["name"], origin["config"], origin["seed"], origin["size"])
    entry = dataset[origin["index"]]
    if digest(entry["question"]) != origin["digest"]:
        answers.write(f"{word} CHANGED\n")
        answers.flush()
        return
    answers.write(f"{word} MADE\n")
    answers.flush()
    try:
        said: dict[str, Any] = {"score": float(dataset.score_answer(request["answer"], entry))}
    except Exception as problem:  # noqa: BLE001  some tasks raise on an answer that is in no way one
        said = {"raised": type(problem).__name__}
    answers.write(f"{word} {json.dumps(said)}\n")
    answers.flush()


if __name__ == "__main__":
    main()

"""The forms in which a user's program may be written, and what is said of those that cannot be called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.environments.user_program import program_of
from rljob_trainer.episodes.environment import tasks_of
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.play import Answer, EpisodeOverError
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.errors import JobFileError, ProgramError

MODULE = '''
async def episode(task, model, world, *, bonus=0.0):
    return bonus + len(task.messages)

def plain(task, model, world): ...

async def narrow(task): ...

class Search:
    def __init__(self, most=1):
        self.most = most
    async def episode(self, task, model, world):
        return self.most

class Countdown:
    """The model says how many to take away."""
    def __init__(self, start):
        self.left = start
    def reset(self, task):
        return f"{self.left} are there"
    async def step(self, text):
        self.left -= int(text)
        return f"{self.left} are left", float(text) / 10, self.left <= 0

class Silent(Countdown):
    def reset(self, task):
        return None
    def step(self, text):
        return "what"

class Speechless(Countdown):
    def step(self, text):
        return None, 0.0, False

class Wordless(Countdown):
    def reset(self, task):
        return 7

class Nothing: ...

number = 3
'''
FIELD = "spec.rollout.environment.function"
PROMPT = Prompt(0, 0, 0, "", "", (1,), None, messages=({"role": "user", "content": "take"},))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / f"program_{abs(hash(request.node.name))}.py").write_text(MODULE)
    return tmp_path


def named(folder: Path, name: str) -> str:
    return f"{next(folder.glob('*.py')).stem}:{name}"


class Says:
    """A model that says these, and then nothing more."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.seen: list[list[str]] = []

    async def chat(self, messages: Any, **_: Any) -> Answer:
        self.seen.append([message["content"] for message in messages])
        if not self.texts:
            raise EpisodeOverError
        text = self.texts.pop(0)
        return Answer((), (), "stop", text, {"role": "assistant", "content": text})


async def played(folder: Path, name: str, model: Says, **params: Any) -> Any:
    program, _ = program_of(named(folder, name), params, FIELD, folder)
    (task,) = tasks_of(PROMPT, [0], SamplingSettings(), seed=1)
    return await program(task, model, None)  # type: ignore[arg-type]


async def test_a_function_and_a_class_get_their_params(folder: Path) -> None:
    assert await played(folder, "episode", Says()) == 1
    assert await played(folder, "episode", Says(), bonus=0.5) == 1.5
    assert await played(folder, "Search", Says(), most=7) == 7


async def test_a_world_goes_step_by_step_until_it_is_over(folder: Path) -> None:
    model = Says("2", "3", "4")
    assert await played(folder, "Countdown", model, start=5) == {"turn_rewards": [0.2, 0.3]}
    assert model.seen == [["take", "5 are there"], ["take", "5 are there", "2", "3 are left"]]
    cut = await played(folder, "Countdown", Says("1"), start=5)
    assert cut == {"turn_rewards": [0.1]}, "one that was cut keeps what it had"


async def test_a_step_that_returns_something_else_is_named(folder: Path) -> None:
    with pytest.raises(ProgramError, match=r"Silent.step returned 'what'; it must return the text for the model"):
        await played(folder, "Silent", Says("1"), start=5)


@pytest.mark.parametrize(
    ("name", "params", "problem"),
    [
        ("absent", {}, "has no absent"),
        ("plain", {}, "is not async"),
        ("narrow", {}, "must accept a task, the model, the world and params: too many positional arguments"),
        ("episode", {"malus": 1}, "unexpected keyword argument 'malus'"),
        ("Search", {"least": 1}, "with the given params"),
        ("Countdown", {}, "cannot create .* with the given params"),
        ("Nothing", {}, "has neither a method episode nor methods reset and step"),
        ("number", {}, "is not async"),
    ],
)
def test_what_cannot_be_called_is_refused_at_the_start(
    folder: Path, name: str, params: dict[str, Any], problem: str
) -> None:
    with pytest.raises(JobFileError, match=problem) as error:
        program_of(named(folder, name), params, FIELD, folder)
    assert str(error.value).startswith(FIELD)


def test_a_module_that_is_not_there_or_raises_is_named(folder: Path) -> None:
    with pytest.raises(JobFileError, match="cannot import absent_module:x"):
        program_of("absent_module:x", {}, FIELD, folder)
    (folder / "keyless_module.py").write_text("{}['key']")
    with pytest.raises(JobFileError, match=r"cannot import \S+ \(KeyError: 'key'\)"):
        program_of("keyless_module:x", {}, FIELD, folder)
    (folder / "broken_module.py").write_text("1 / 0")
    with pytest.raises(JobFileError, match="ZeroDivisionError"):
        program_of("broken_module:x", {}, FIELD, folder)


@pytest.mark.parametrize(
    ("name", "told"),
    [("Speechless", "step returned None for the model, which"), ("Wordless", "reset returned 7 for the model,")],
)
async def test_what_is_no_text_is_not_told_to_the_model(folder: Path, name: str, told: str) -> None:
    """A template would make the word "None" of it."""

    class Model:
        async def chat(self, messages: Any) -> Answer:
            return Answer((), (), "stop", "1", {"role": "assistant", "content": "1"})

    (module,) = folder.glob("*.py")
    program, _ = program_of(f"{module.stem}:{name}", {"start": 3}, FIELD, folder)
    (task,) = tasks_of(PROMPT, [0], SamplingSettings(), seed=0)
    with pytest.raises(ProgramError, match=f"{name}.{told}"):
        await program(task, Model(), None)  # type: ignore[arg-type]


def test_a_module_that_ends_its_interpreter_is_told_and_ends_nothing(folder: Path) -> None:
    (folder / "a_script_that_exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(JobFileError, match=r"cannot import a_script_that_exits:main \(SystemExit: 0\)"):
        program_of("a_script_that_exits:main", {}, FIELD, folder)

"""Agents in processes of their own: what they are given and return, how they fail, and that nothing of them is left."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from scripted_model import CALL, Scripted, environment, said, tasks

from rljob_trainer.endpoint.server import Endpoint, serving_endpoint
from rljob_trainer.environments.agents import function as agent_functions
from rljob_trainer.environments.agents.command import AgentCommand
from rljob_trainer.environments.agents.common import Agents
from rljob_trainer.environments.agents.function import AgentFunction
from rljob_trainer.episodes import programs as episodes_programs
from rljob_trainer.episodes.episode import Episode
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.errors import JobFileError, ProgramError, WorldFailedError

ROOT = Path(__file__).parents[3]
PAGE, EXAMPLE = ROOT / "docs" / "agents.md", ROOT / "examples" / "openai-agent" / "parity_agent.py"


def without_docstrings(tree: ast.Module) -> ast.Module:
    """A module without the texts that stand by themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef):
            node.body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return tree


# Of the standard library alone, so that it starts at once.
ASK = """
import json, os, sys, urllib.request

def ask(messages, client=None, **more):
    client = client or {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"],
                        "model": os.environ["OPENAI_MODEL"]}
    body = json.dumps({"model": client["model"], "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + client["api_key"], "Content-Type": "application/json"}
    request = urllib.request.Request(client["base_url"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]
"""
OPENAI = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
messages, policy = task["messages"], OpenAI()
message = policy.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
told = str(eval(json.loads(message.tool_calls[0].function.arguments)["expression"]))
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": told}]
message = policy.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
print("an agent may print what it likes")
print(json.dumps({"score": float(message.content == task["answer"]), "prediction": message.content}))
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost begins anew without a pause."""
    monkeypatch.setattr(episodes_programs, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving_endpoint() as served:
        yield served


def command(folder: Path, text: str, params: Any = None) -> AgentCommand:
    """A command that is a Python script."""
    (folder / "agent.py").write_text(ASK + text)
    return AgentCommand(["python", "agent.py"], params or {}, folder, "a field")


def function(folder: Path, text: str, name: str, params: Any = None) -> AgentFunction:
    (folder / f"{name}.py").write_text(ASK + text)
    return AgentFunction(f"{name}:run", params or {}, folder, "a field")


async def play(
    agents: Agents, model: Scripted, endpoint: Endpoint, log: EpisodeLog, samples: int = 1, **options: Any
) -> tuple[list[Episode], dict[str, float]]:
    programs = environment(agents, endpoint, log, **options)
    try:
        return await programs.play(tasks(samples), model), programs.take_counts()
    finally:
        await agents.close()


async def gone(pid: int) -> bool:
    """Whether a process ends; within the time that a test has."""
    while _runs(pid):  # noqa: ASYNC110  nobody says it
        await asyncio.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_a_command_plays_an_episode_with_openais_client(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    (tmp_path / "agent.py").write_text(OPENAI)
    agents = AgentCommand(["python", "agent.py"], {}, tmp_path, "a field")
    (episode,), counts = await play(agents, Scripted(CALL, "42"), endpoint, log)
    assert episode.returned == {"score": 1.0, "prediction": "42"}
    (leaf,) = episode.leaves
    assert [leaf.tokens.ids[t.start : t.stop].tolist() for t in leaf.turns] == [said(CALL), said("42")]
    assert (counts["rollout/tool_calls"], counts["rollout/branched_turns"]) == (1, 0)


async def test_the_commands_and_the_functions_of_the_page_are_agents(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    command_, function_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_agent.py").write_text(command_)
    agents = AgentCommand(["python", "my_agent.py"], {}, tmp_path, "a field")
    (episode,), _ = await play(agents, Scripted("It is 42."), endpoint, log)
    assert episode.returned == 1.0
    # Without the lines that only people need.
    example = ast.unparse(without_docstrings(ast.parse(EXAMPLE.read_text())))
    assert ast.unparse(ast.parse(function_)) in example


async def test_an_agent_is_given_the_task_and_its_params(tmp_path: Path, endpoint: Endpoint, log: EpisodeLog) -> None:
    text = """
task = json.load(sys.stdin)
open("given.json", "w").write(json.dumps(task))
print(len(ask(task["messages"])["content"]))
"""
    (episode,), _ = await play(command(tmp_path, text, {"depth": 3}), Scripted("four"), endpoint, log)
    assert episode.returned == 4.0
    (task,) = tasks()
    assert json.loads((tmp_path / "given.json").read_text()) == {
        "messages": task.messages,
        "prompt": task.prompt.text,
        "answer": "42",
        "row": {"level": 2},
        "seed": task.world_seed,
        "params": {"depth": 3},
    }


async def test_a_function_plays_one_episode_after_the_other_in_the_same_process(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    text = """
def run(task, client, bonus):
    print("this goes nowhere")
    content = ask(task["messages"], client)["content"]
    return {"score": float(content == task["answer"]) + bonus, "prediction": os.getpid()}
"""
    agents = function(tmp_path, text, "in_turns", {"bonus": 0.5})
    await agents.start()
    episodes, _ = await play(agents, Scripted("42"), endpoint, log, samples=3, at_once=1)
    assert [episode.returned["score"] for episode in episodes] == [1.5] * 3
    (pid,) = {int(episode.returned["prediction"]) for episode in episodes}
    assert pid != os.getpid()
    assert await gone(pid)


ASYNC = """
import asyncio, threading

async def run(task, client):
    content = (await asyncio.to_thread(ask, task["messages"], client))["content"]
    {more}
    return {{"score": float(content == task["answer"]), "prediction": os.getpid()}}
"""


async def test_an_async_function_plays_many_episodes_at_once_in_one_process(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_functions, "AT_ONCE", 3)
    agents = function(tmp_path, ASYNC.format(more=""), "at_once")
    await agents.start()
    model = Scripted("42")
    model.gate.clear()
    playing = asyncio.create_task(play(agents, model, endpoint, log, samples=6, at_once=6))
    while len(model.seen) < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    model.gate.set()
    episodes, _ = await playing
    assert [episode.returned["score"] for episode in episodes] == [1.0] * 6
    processes = [episode.returned["prediction"] for episode in episodes]
    assert sorted(map(processes.count, set(processes))) == [3, 3]


@pytest.mark.parametrize("more", ["await asyncio.sleep(1000)", "while True: asyncio.current_task().uncancel()"])
async def test_an_async_episode_that_is_given_up_ends_and_a_deaf_one_with_its_process(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setattr(agent_functions, "_PARTING_SECONDS", 0.2)
    stuck = ["if os.path.exists('stuck'):", "open('pid', 'w').write(str(os.getpid()))", more]
    agents = function(tmp_path, ASYNC.format(more="\n        ".join(stuck)), f"deaf_{len(more)}")
    await agents.start()
    (tmp_path / "stuck").touch()
    playing = asyncio.create_task(environment(agents, endpoint, log).play(tasks(1), Scripted("42")))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    playing.cancel()
    await asyncio.wait([playing])
    (tmp_path / "stuck").unlink()
    if more.startswith("while"):
        assert await gone(int((tmp_path / "pid").read_text()))
    (episode,), _ = await play(agents, Scripted("42"), endpoint, log)
    assert episode.returned["score"] == 1.0
    same = episode.returned["prediction"] == (tmp_path / "pid").read_text()
    assert same == more.startswith("await")


FAILING: list[tuple[str, type[Exception], str]] = [
    ("print('help', file=sys.stderr); sys.exit(3)", ProgramError, "exit code 3(.|\n)*help"),
    ("print('done')", ProgramError, "'done', but it must be the reward"),
    ("os.kill(os.getpid(), 11)", ProgramError, "signal SIGSEGV"),
    ("sys.exit(75)", WorldFailedError, "lost 2 times, the last time because the agent python agent.py ended with exit"),
    ("os.kill(os.getpid(), 9)", WorldFailedError, "signal SIGKILL"),
    # A shell says so what became of a command of its own: memory ran out.
    ("sys.exit(137)", WorldFailedError, "lost 2 times, the last time because .* ended with exit code 137"),
    ("sys.exit(139)", ProgramError, "exit code 139"),
    ("print('[' * 100_000)", ProgramError, "but it must be the reward"),
]


@pytest.mark.parametrize(("text", "error", "told"), FAILING)
async def test_a_command_that_fails_ends_the_run_and_is_no_reward(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog, text: str, error: type[Exception], told: str
) -> None:
    asks = "ask(json.load(sys.stdin)['messages'])\n"
    with pytest.raises(error, match=rf"sample 0 of prompt 5: (.|\n)*{told}"):
        await play(command(tmp_path, asks + text), Scripted("42"), endpoint, log)


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        ("raise KeyError('x')", ProgramError, "raised KeyError: 'x'\n(.|\n)*in run"),
        ("return {1, 2}", ProgramError, "raised TypeError: Object of type set"),
        ("sys.exit(75)", WorldFailedError, "lost 2 times"),
        ("os._exit(4)", ProgramError, "exit code 4"),
    ],
)
async def test_a_function_that_fails_ends_the_run(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog, body: str, error: type[Exception], told: str
) -> None:
    text = f"def run(task, client):\n    ask(task['messages'], client)\n    {body}\n"
    agents = function(tmp_path, text, "failing")
    await agents.start()
    with pytest.raises(error, match=told):
        await play(agents, Scripted("42"), endpoint, log)


async def test_an_agent_that_was_lost_begins_anew_and_only_that_is_trained(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    text = """
message = ask(json.load(sys.stdin)["messages"])
if not os.path.exists("tried"):
    open("tried", "w")
    os.kill(os.getpid(), 9)
print(1)
"""
    model = Scripted("42")
    (episode,), counts = await play(command(tmp_path, text), model, endpoint, log)
    assert (len(model.seen), len(episode.leaves), episode.returned) == (2, 1, 1.0)
    assert counts["rollout/diverged_episodes"] == 1


async def test_an_agent_that_ends_because_its_episode_is_over_is_cut(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    text = "messages = json.load(sys.stdin)['messages']\nwhile True:\n    ask(messages)\n"
    (episode,), _ = await play(command(tmp_path, text), Scripted("41"), endpoint, log, turns=3)
    assert (episode.finish, episode.returned, len(episode.leaves)) == ("length", None, 3)


async def test_an_agent_that_is_at_work_for_too_long_is_cut(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    text = """
ask(json.load(sys.stdin)["messages"])
open("pid", "w").write(str(os.getpid()))
import time; time.sleep(1000)
"""
    (episode,), _ = await play(command(tmp_path, text), Scripted("41"), endpoint, log, seconds=4.0)
    assert (episode.finish, episode.returned, len(episode.leaves)) == ("length", None, 1)
    assert await gone(int((tmp_path / "pid").read_text()))


async def test_an_agent_that_never_asks_is_told_from_one_that_was_cut(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    with pytest.raises(ProgramError, match=r"did not ask the model within 0\.2 s"):
        await play(command(tmp_path, "import time; time.sleep(1000)"), Scripted("41"), endpoint, log, seconds=0.2)


async def test_time_in_which_the_model_is_asked_is_not_the_agent_s(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    """The answer comes when all of the agent's time would be over."""
    model = Scripted("42")
    model.gate.clear()
    text = "ask(json.load(sys.stdin)['messages'])\nprint(1)"
    playing = asyncio.create_task(play(command(tmp_path, text), model, endpoint, log, seconds=3.0))
    while not model.seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (episode,) = endpoint._open.values()
    left = episode.own_time._left
    assert 0 < left < 3
    await asyncio.sleep(left + 0.5)
    model.gate.set()
    (played,), _ = await playing
    assert (played.returned, played.finish) == (1.0, "stop")


LEAVES_CHILDREN = """
import subprocess, time
ask(json.load(sys.stdin)["messages"])
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
kept = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("left.new", "w").write(" ".join(str(p) for p in [os.getpid(), *(child.pid for child in kept)]))
        os.rename("left.new", "left")
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("left"):
    time.sleep(0.01)
"""


async def test_nothing_is_left_of_an_agent_that_has_ended(tmp_path: Path, endpoint: Endpoint, log: EpisodeLog) -> None:
    (episode,), _ = await play(command(tmp_path, LEAVES_CHILDREN + "print(1)"), Scripted("42"), endpoint, log)
    assert episode.returned == 1.0
    for pid in map(int, (tmp_path / "left").read_text().split()):
        assert await gone(pid)


async def test_nothing_is_left_of_an_agent_whose_episode_is_given_up(
    tmp_path: Path, endpoint: Endpoint, log: EpisodeLog
) -> None:
    agents = command(tmp_path, LEAVES_CHILDREN + "open('own', 'w').write(str(os.getpid()))\ntime.sleep(1000)")
    playing = asyncio.create_task(play(agents, Scripted("42"), endpoint, log))
    while not (tmp_path / "own").exists() or not (tmp_path / "own").read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled()
    for pid in map(int, ((tmp_path / "left").read_text() + " " + (tmp_path / "own").read_text()).split()):
        assert await gone(pid)


DRIVER = """
import asyncio, sys
from pathlib import Path
from rljob_trainer.environments.agents.process import AgentProcess

async def main():
    folder = Path(sys.argv[1])
    process = await AgentProcess.start([sys.executable, "agent.py"], {}, folder)
    await process.output()

asyncio.run(main())
"""


def test_a_driver_that_is_killed_takes_its_agents_with_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "open('left.new', 'w').write(f'{os.getpid()} {os.getppid()} {child.pid}')\n"
        "os.rename('left.new', 'left')\n"
        "time.sleep(1000)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, tmp_path])
    try:
        while not (tmp_path / "left").exists():
            assert driver.poll() is None
            time.sleep(0.01)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    pids = list(map(int, (tmp_path / "left").read_text().split()))
    assert len(pids) == 3
    assert all(asyncio.run(gone(pid)) for pid in pids)


async def test_as_many_agents_run_at_once_as_the_job_says(tmp_path: Path, endpoint: Endpoint, log: EpisodeLog) -> None:
    text = "ask(json.load(sys.stdin)['messages'])\nprint(1)"
    model = Scripted("42")
    model.gate.clear()
    playing = asyncio.create_task(play(command(tmp_path, text), model, endpoint, log, samples=5, at_once=2))
    while len(model.seen) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert (len(endpoint._open), len(model.seen)) == (2, 2)
    model.gate.set()
    episodes, _ = await playing
    assert (len(episodes), len(model.seen)) == (5, 5)


def never(_: Any) -> Any:
    raise AssertionError("the model was asked again")


async def test_an_episode_that_has_ended_is_played_again_from_its_record_alone(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    text = """
messages = json.load(sys.stdin)["messages"]
one = ask(messages)
ask([*messages, {"role": "assistant", "content": "changed"}, {"role": "user", "content": "And now?"}])
ask([*messages, one, {"role": "user", "content": "Sure?"}], max_tokens=3)
try:
    ask(messages)
except urllib.error.HTTPError as error:
    print(error.code / 800)
"""
    agents, first = command(tmp_path, text), EpisodeLog(tmp_path / "episodes")
    (expected,), _ = await play(agents, Scripted("one", "two", "three"), endpoint, first, turns=3)
    assert (expected.returned, expected.finish, len(expected.leaves)) == (0.5, "length", 2)
    first.close()

    again = EpisodeLog(tmp_path / "episodes")
    again.restore([5], 6, step=1, version=3, published_as=3)
    model = Scripted()
    model._answer = never  # type: ignore[method-assign]
    missing = command(tmp_path, "sys.exit('the agent was started again')")
    (episode,), counts = await play(missing, model, endpoint, again, turns=3)
    again.close()
    assert counts["rollout/diverged_episodes"] == 0
    assert (episode.returned, episode.finish) == (expected.returned, expected.finish)
    for leaf, other in zip(episode.leaves, expected.leaves, strict=True):
        assert leaf.prompt_ids == other.prompt_ids
        assert [turn[:2] for turn in leaf.turns] == [turn[:2] for turn in other.turns]
        for name, stream in leaf.tokens.streams().items():
            assert stream.tolist() == other.tokens.streams()[name].tolist()


class Stuck(Scripted):
    """Never ends its second turn."""

    async def generate(self, requests: Any, finished: Any = None) -> Any:
        if requests[0].id.turn == 1:
            self.gate.clear()
        return await super().generate(requests, finished)


@pytest.mark.parametrize("newer", [False, True], ids=["the agent was killed", "newer weights made its last turn"])
async def test_an_episode_that_has_not_ended_begins_anew_and_it_is_said(
    tmp_path: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture, newer: bool
) -> None:
    first, model = EpisodeLog(tmp_path / "episodes"), Scripted("one", "two") if newer else Stuck("one")
    text = "messages = json.load(sys.stdin)['messages']\nask(messages)\nask(messages)\nprint(1)"
    if newer:
        answer: Callable[[Any], Any] = model._answer

        def later(request: Any) -> Any:
            model.version = 3 + request.id.turn
            return answer(request)

        model._answer = later  # type: ignore[method-assign]
        await play(command(tmp_path, text), model, endpoint, first)
    else:
        playing = asyncio.create_task(play(command(tmp_path, text), model, endpoint, first))
        while len(model.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.wait([playing])
    first.close()

    again, after = EpisodeLog(tmp_path / "episodes"), Scripted("three", "four")
    again.restore([5], 6, step=1, version=3, published_as=3)
    (episode,), counts = await play(command(tmp_path, text), after, endpoint, again)
    again.close()
    assert counts["rollout/diverged_episodes"] == 1
    assert "sample 0 of prompt 5 starts over" in caplog.text
    assert ("part of it was generated by newer weights" in caplog.text) == newer
    assert [leaf.tokens.ids.tolist() for leaf in episode.leaves] == [said("three"), said("four")]


async def test_agents_that_cannot_be_had_are_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="a field: no-such-agent is not an executable command"):
        AgentCommand(["no-such-agent"], {}, tmp_path, "a field")
    for text, name, told in (
        ("", "empty_agent", "has no run"),
        ("run = 3", "no_function", "run is not a function"),
        ("1 / 0", "broken_agent", "ZeroDivisionError"),
        ("sys.exit(0)", "script_agent", "SystemExit"),
        ("os._exit(5)", "dying_agent", "exit code 5"),
    ):
        agents = function(tmp_path, text, name)
        with pytest.raises(JobFileError, match=rf"a field: .*the agent {name}:run (.|\n)*{told}"):
            await agents.start()
        await agents.close()

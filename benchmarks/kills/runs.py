"""A run that is killed again and again until it is done, and what its ledger and metrics must say then.

The job goes over its data a fixed number of times and then ends, so every prompt has to end too. Killed are processes
of the run's own tree, found by what Ray calls them; whatever a killed driver leaves is ended before the next start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

Victim = Literal["driver", "rank", "engine", "all"]
VICTIMS: tuple[Victim, ...] = ("driver", "rank", "engine", "all")
MODES = ("sync", "oneStepOff", "fullyAsync")
MAX_AGE = {"sync": 0, "oneStepOff": 1, "fullyAsync": 2}
PROMPTS, EPOCHS, GROUPS = 48, 4, 8
LAST_STEPS = 5
"""At the end of a run, for which no kill is planned."""
RUN_SECONDS = 1500.0
_TITLES = {"rank": "ray::RankActor", "engine": "ray::EngineActor"}


class KilledRunError(AssertionError):
    """Something was lost, done twice, or broke its bound."""


@dataclass(slots=True)
class Story:
    """What was done to a run."""

    mode: str
    seed: int
    kills: list[str] = field(default_factory=list)
    starts: int = 0
    rolled_back: int = 0
    """Steps that were done and are not part of the surviving lineage."""
    undone: list[tuple[int, int]] = field(default_factory=list)
    """Prompts that were trained in them, each with the attempt that did."""


PROGRAM = "two_turns"
"""The module beside the job of episodes of two turns."""
_PROGRAM = '''
import asyncio

async def episode(task, model, world):
    """The model tries; a service that takes its time says how many characters are right; the model tries again."""
    first = await model.chat(task.messages, max_tokens=4)
    right = await world.call("compare", compare, first.text, task.prompt.answer)
    told = {"role": "tool", "content": f"{right}="}
    second = await model.chat([*task.messages, first.message, told], max_tokens=4)
    return await compare(second.text, task.prompt.answer) / len(task.prompt.answer)

async def compare(said, answer):
    await asyncio.sleep(0.01)
    return sum(a == b for a, b in zip(said, answer))
'''

AGENT = "agent_of_two_turns"
"""The module of the same as an agent, which knows its model by an address."""
_AGENT = """
import json, time, urllib.request

def run(task, client):
    messages = task["messages"]
    first = ask(client, messages)
    time.sleep(0.01)
    told = {"role": "user", "content": f"{compare(first, task['answer'])}="}
    second = ask(client, [*messages, {"role": "assistant", "content": first}, told])
    return compare(second, task["answer"]) / len(task["answer"])

def ask(client, messages):
    body = json.dumps({"model": client["model"], "messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": "Bearer " + client["api_key"], "Content-Type": "application/json"}
    request = urllib.request.Request(client["base_url"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

def compare(said, answer):
    return sum(a == b for a, b in zip(said, answer))
"""


def job(mode: str, turns: int = 1, *, agent: bool = False) -> dict[str, Any]:
    """Copy two digits: a tiny model, two engines beside one rank, all prompts ``EPOCHS`` times. ``turns``: of an
    episode, one or two. ``agent``: those of two are played by an agent."""
    characters = {"characters": "0123456789="}
    model = {"hiddenSize": 64, "layers": 2, "heads": 2, "contextLength": 24, "tokenizer": characters}
    batch: dict[str, Any] = {"samplesPerPrompt": 4, "miniBatchGroups": 4}
    pipeline: dict[str, Any] = {"mode": mode}
    if mode == "fullyAsync":
        pipeline |= {"syncEvery": 2, "staleness": {"maxAge": MAX_AGE[mode]}, "partialRollout": "recompute"}
    else:
        batch["groups"] = GROUPS
    written = _job(mode, model, batch, pipeline)
    if turns == 2:
        spec = written["spec"]
        spec["model"]["chatTemplate"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        spec["rollout"]["environment"] = (
            {"type": "agent", "function": f"{AGENT}:run", "agents": 8}
            if agent
            else {"type": "custom", "function": f"{PROGRAM}:episode"}
        )
        spec["reward"] = {"functions": [{"type": "environment"}]}
    return written


def _job(mode: str, model: dict[str, Any], batch: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": f"kills-{mode.lower()}"},
        "spec": {
            "model": {"random": model},
            "data": {
                "train": {"task": {"type": "copy", "digits": 2, "size": PROMPTS}},
                "prompt": "question",
                "answer": "answer",
                "maxPromptTokens": 6,
            },
            "reward": {"functions": [{"type": "exactMatch", "params": {"partial": True}}]},
            "algorithm": {"preset": "grpo"},
            "batch": batch,
            "placement": "separate",
            "pipeline": pipeline,
            "rollout": {"engine": "torch", "maxResponseTokens": 12, "replicas": 2},
            "trainer": {"optimizer": {"learningRate": 1e-3}},
            "checkpoint": {"everySteps": 3},
            "logging": {"tensorboard": False, "samplesEvery": 0},
            "stop": {"epochs": EPOCHS},
        },
    }


def run_to_the_end(
    mode: str, folder: Path, victims: Sequence[Victim], seed: int, turns: int = 1, *, agent: bool = False
) -> Story:
    """Starts the job, kills ``victims`` one after the other at random moments, and lets it end. Checks nothing."""
    rng, story = random.Random(seed), Story(mode, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job(mode, turns, agent=agent)))
    (folder / f"{PROGRAM}.py").write_text(_PROGRAM)
    (folder / f"{AGENT}.py").write_text(_AGENT)
    output = folder / "output"
    left = list(victims)
    deadline = time.monotonic() + RUN_SECONDS
    while True:
        process = _start(folder, output, story.starts)
        story.starts += 1
        try:
            while process.poll() is None and left:
                _wait_for_a_moment(process, output, rng, deadline)
                if process.poll() is None and _kill(process, left[0]):
                    story.kills.append(f"{left.pop(0)} at step {_last_step(output)}")
            reached = _last_step(output)
            code = process.wait(max(1.0, deadline - time.monotonic()))
        finally:
            _end(process)
        if code == 0:
            return story
        if code not in (-signal.SIGKILL, 75):
            raise KilledRunError(f"exit code {code} after {story.kills}:\n{_tail(folder, story.starts - 1)}")
        story.rolled_back += max(0, max(reached, _last_step(output)) - _checkpointed(output))
        story.undone += _undone(output)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a prompt. Versions are not part of it: a restarted run uses no number twice."""

    state: str
    step: int | None
    age: int | None
    samples: int | None
    tokens: int | None
    reward: float | None


def check(output: Path, mode: str, undone: Sequence[tuple[int, int]] = ()) -> dict[int, Ended]:
    """Every prompt ended once, ages kept their bound, the record agrees and knows each copy that was ``undone``.
    Returns what became of each, by ordinal.

    Raises ``KilledRunError``.
    """
    with sqlite3.connect(f"file:{output / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        rows = ledger.execute(
            "SELECT ordinal, epoch, row, state, trained_step, trained_version, oldest_version, deadline, samples, "
            "tokens, reward FROM groups ORDER BY ordinal"
        ).fetchall()
        resampled = set(ledger.execute("SELECT ordinal, attempt FROM resampled WHERE reason = 'rolled back'"))
        versions = [version for (version,) in ledger.execute("SELECT version FROM versions ORDER BY rowid")]
    _expect([row[0] for row in rows] == list(range(PROMPTS * EPOCHS)), "prompts are missing or were invented")
    _expect(
        {(row[1], row[2]) for row in rows} == {(e, r) for e in range(EPOCHS) for r in range(PROMPTS)}, "rows differ"
    )
    unended = [row[0] for row in rows if row[3] not in ("trained", "dropped")]
    _expect(not unended, f"prompts {unended} have not ended")
    for ordinal, _, _, state, _, version, oldest, last, *_ in rows:
        if state == "trained":
            _expect(0 <= version - oldest <= MAX_AGE[mode], f"prompt {ordinal} has age {version - oldest}")
            _expect(version <= last, f"prompt {ordinal} was trained in version {version}, after its deadline {last}")
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"] > 0]
    _expect([step["step"] for step in steps] == list(range(1, len(steps) + 1)), "steps are missing or repeated")
    per_step: dict[int, int] = {}
    for row in rows:
        if row[4] is not None:
            per_step[row[4]] = per_step.get(row[4], 0) + 1
    total = 0
    for step in steps:
        total += per_step.get(step["step"], 0)
        _expect(step["progress/groups"] == total, f"step {step['step']} counts {step['progress/groups']}, not {total}")
        _expect(step["age/max"] <= MAX_AGE[mode], f"step {step['step']} has age {step['age/max']}")
    numbers = [int(step["progress/version"]) for step in steps]
    _expect(numbers == sorted(set(numbers)), "version numbers were used twice")
    _expect(set(numbers) <= set(versions), "a version was published that the ledger does not know")
    unknown = set(undone) - resampled
    _expect(not unknown, f"copies of prompts (and the attempts that trained them) are not on record: {unknown}")
    return {
        ordinal: Ended(state, step, None if version is None else version - oldest, *made)
        for ordinal, _, _, state, step, version, oldest, _, *made in rows
    }


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise KilledRunError(otherwise)


def _start(folder: Path, output: Path, number: int) -> subprocess.Popen[bytes]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "rljob_trainer.cli", "run", str(folder / "job.yaml"), "--output", str(output)]
    with (folder / f"printed-{number}").open("wb") as printed:
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)


def _wait_for_a_moment(process: subprocess.Popen[bytes], output: Path, rng: random.Random, deadline: float) -> None:
    """Some steps after what the record holds now, and then some part of a step more; but not among the last steps,
    which on a busy machine are over before anybody is killed."""
    latest = PROMPTS * EPOCHS // GROUPS - LAST_STEPS
    step, patience = min(_last_step(output) + rng.randint(0, 4), latest), rng.uniform(0.0, 0.4)
    while process.poll() is None and (_last_step(output) < step or not _actors(process, "engine")):
        if time.monotonic() > deadline:
            raise KilledRunError(f"the run hangs after step {_last_step(output)}")
        time.sleep(0.02)
    time.sleep(patience)


def _kill(process: subprocess.Popen[bytes], victim: Victim) -> bool:
    """SIGKILL; False when there is no such process just now."""
    if victim in _TITLES:
        actors = _actors(process, victim)
        if not actors:
            return False
        _send_kill(actors[:1])
        return True
    tree = _tree(process)
    _send_kill([psutil.Process(process.pid)] if victim == "driver" else [psutil.Process(process.pid), *tree])
    process.wait()
    # What a killed driver leaves would end by itself, but not before the next one starts.
    _send_kill(tree)
    return True


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _actors(process: subprocess.Popen[bytes], kind: str) -> list[psutil.Process]:
    found = []
    for child in _tree(process):
        try:
            if any(part.startswith(_TITLES[kind]) for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _send_kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _end(process: subprocess.Popen[bytes]) -> None:
    tree = _tree(process)
    if process.poll() is None:
        process.kill()
        process.wait()
    _send_kill(tree)


def _last_step(output: Path) -> int:
    try:
        lines = (output / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:  # a run that begins anew takes away what the one before has written
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _checkpointed(output: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*")), default=0)


def _undone(output: Path) -> list[tuple[int, int]]:
    """What the next start is going to undo, as the ledger that a killed run leaves says."""
    checkpointed = _checkpointed(output)
    if not checkpointed:  # the next start begins anew, with another ledger
        return []
    with sqlite3.connect(f"file:{output / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return ledger.execute("SELECT ordinal, attempt FROM groups WHERE trained_step > ?", (checkpointed,)).fetchall()


def _tail(folder: Path, number: int) -> str:
    return "\n".join((folder / f"printed-{number}").read_text().splitlines()[-20:])

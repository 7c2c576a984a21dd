"""Reward functions as a user might write them, good and bad, for the tests of the worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any


def count_letters(prompt: str, response: str, answer: str | None, **columns: Any) -> int:
    return len(response)


def everything(**known: Any) -> dict[str, Any]:
    return {"score": known["tokens"], "prediction": sorted(known), "correct": True}


def by_column(response: str, level: int, *, bonus: float = 0.0) -> float:
    return level + bonus


def misbehaves(response: str) -> Any:
    """Does what the response says."""
    print("printed by a reward function")
    match response:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "child":
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"], check=False)
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "quit":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            return float("nan")
        case "inf":
            return {"score": float("inf")}
        case "nothing":
            return None
        case "text":
            return "1.0"
        case "list":
            return [1.0]
        case "mapping":
            return {"value": 1.0}
    return 1.0


async def judge(response: str) -> float:
    """An async judge, which waits for a service."""
    if response == "never":
        await asyncio.sleep(1000)
    if response == "block":
        time.sleep(1000)  # noqa: ASYNC251  the mistake that this is about
    await asyncio.sleep(0.2)
    return 2.0


_under_way = 0


async def meets(response: str, expected: int) -> float:
    """Returns once so many calls are under way at the same time, and how many there were."""
    global _under_way
    _under_way += 1
    while _under_way < expected:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return _under_way


def counts_calls(response: str, journal: str) -> float:
    """Notes every call in the file ``journal``; crashes when asked to."""
    with open(journal, "a") as file:
        file.write(response + "\n")
    if response == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def each_answer(returned: object) -> object:
    """What the environment's program has said of it."""
    return returned

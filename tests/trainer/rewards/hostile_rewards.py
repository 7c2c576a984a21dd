"""Reward functions that do to their process, or return, what nobody should, for ``test_hostile.py``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Text(str):
    """A text of a class that the driver does not know."""

    def __str__(self) -> str:
        return self


class NoRepr:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def waits_once(response: str, marker: str) -> float:
    """Waits to be killed or stopped when it is called with ``wait`` for the first time, and tells its process."""
    if response == "wait" and not Path(marker).exists():
        Path(marker).write_text(str(os.getpid()))
        for _ in range(20):  # a single wait would end during a stop, however long it is
            time.sleep(0.1)
    return float(len(response))


async def waits_once_async(response: str, marker: str) -> float:
    if response == "wait" and not Path(marker).exists():
        Path(marker).write_text(str(os.getpid()))
        for _ in range(20):
            await asyncio.sleep(0.1)
    return float(len(response))


def tells_and_waits(response: str, marker: str) -> float:
    if response == "wait":
        Path(f"{marker}-{os.getpid()}").touch()
        time.sleep(60)
    return float(len(response))


def raises(response: str) -> Any:
    match response:
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "generator":
            raise GeneratorExit("done")
        case "exit":
            sys.exit("wrong")
        case "recursion":
            return raises(response)
        case "memory":
            raise MemoryError
        case "unreadable":
            raise UnreadableError
        case "long":
            raise ValueError("x" * 10**7)
        case "surrogate":
            raise ValueError("half \ud83d of it")
    return 1.0


async def raises_async(response: str) -> Any:
    return raises(response)


def returns(response: str) -> Any:
    match response:
        case "float64":
            return 1e300
        case "digits":
            return 10**6000
        case "decimal":
            return Decimal("1e999")
        case "fraction":
            return Fraction(10**400)
        case "sum":
            return 9e14
        case "norepr":
            return NoRepr()
        case "book":
            return {"score": 1, "prediction": "a" * 10**7}
        case "other book":
            return {"score": 1, "prediction": "a" * (10**7 - 1) + "b"}
        case "own text":
            return {"score": True, "prediction": Text("seven"), "correct": 3}
        case "half":
            return {"score": 1, "prediction": "\ud83d"}
    return 1.0


def forks(response: str, does: str) -> float:
    """Forks on ``fork``: the child returns, raises, or lives on in a session of its own. Otherwise: the length."""
    if response == "fork":
        if (child := os.fork()) == 0:
            match does:
                case "returns":
                    return -7.0
                case "raises":
                    raise ValueError("the child's")
                case "exits":
                    sys.exit(1)
                case "stays":
                    os.setsid()
                    time.sleep(60)
        if does != "stays":
            os.waitpid(child, 0)
        else:
            time.sleep(0.1)
            os._exit(3)
    return float(len(response))


async def forks_async(response: str) -> float:
    await asyncio.sleep(0.05)
    if response == "fork":
        os.fork()
    await asyncio.sleep(0.05)
    return float(len(response))


def starts_a_session(response: str, marker: str) -> float:
    if response.startswith("start"):
        program = [sys.executable, "-c", "import time; time.sleep(60)"]
        if response.startswith("start late"):  # nobody sees whose it is until then
            run = "os.execve(sys.argv[1], sys.argv[1:4], {sys.argv[4]: sys.argv[5]})"
            late, mark = f"import os, sys, time; time.sleep(0.5); {run}", "RLJOB_REWARD_WORKER"
            program = [sys.executable, "-c", late, *program, mark, os.environ[mark]]
        child = subprocess.Popen(program, start_new_session=True, env={} if "late" in response else None)
        with Path(marker).open("a") as file:
            file.write(f"{child.pid}\n")
        if response.endswith("and end"):
            os._exit(3)
        time.sleep(60)
    return float(len(response))


def disturbs(response: str) -> float:
    match response:
        case "close":
            os.closerange(0, 1024)
        case "write":
            for descriptor in range(3, 10):  # its pipe, and not the memory that it shares with the driver
                try:
                    os.write(descriptor, b"not a message")
                except OSError:
                    continue
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            time.sleep(30)
    return float(len(response))


async def keeps_its_cancellation(response: str) -> float:
    while response == "keep":
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            continue
    return float(len(response))


class Judge:
    async def __call__(self, response: str) -> float:
        return float(len(response))


judge = Judge()

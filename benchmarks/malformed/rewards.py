"""Random reward functions that misbehave, run by the real pool of worker processes.

``run(count, seed)`` makes ``count`` cases. Each is a handful of samples, of which some make the function do one thing
that no function should: return a strange value, raise, fork, exit, kill or stop its process, sleep, flood the output,
leave threads and processes behind, close descriptors, exhaust memory; or its worker is killed or stopped from outside.
What must hold: an odd sample gets its right score, or a sentence that names function and sample with the right exit
code; the other samples get their right scores, in this case and in the next one; nothing takes longer than the limits
allow; no traceback reaches the driver; no process is left.

The functions stand in this file too, and the workers import it: at its top it needs the standard library only.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import functools
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljob_trainer.rewards.pool import RewardPool
    from rljob_trainer.rewards.terms import Response

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 1
_CASE_SECONDS = 60.0
"""Far beyond what any case may take: two deadlines, and a few starts of a process on a busy machine."""

RIGHT, REFUSED, TRY_AGAIN = "right score", "named, exit code 65", "named, exit code 75"
"""The outcomes that are allowed; anything else is told as it was."""


# What the odd samples make the function do. Each returns the score, or does what it is named after.


class Strange:
    """An object whose every method does what it was told."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does = does

    def _do(self, *_: Any) -> Any:
        return self.does()

    __float__ = __index__ = __int__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = __hash__ = __eq__ = _do  # type: ignore[assignment]


class StrangeClass(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class Nameless(metaclass=StrangeClass):
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


class StrangeMap(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no item")

    def __iter__(self) -> Any:
        return iter(["score"])

    def __len__(self) -> int:
        return 1


class StrangeText(str):
    def __str__(self) -> str:
        return self

    def __len__(self) -> int:
        return -1

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("no bytes")


class StrangeError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class StrangeBase(BaseException):
    pass


def _raise(problem: BaseException) -> Any:
    raise problem


def _deep(levels: int) -> Any:
    value: Any = 1.0
    for _ in range(levels):
        value = [value]
    return value


def _verdict(*fields: Any) -> Any:
    from rljob_trainer.rewards.rules import RewardVerdict

    return RewardVerdict(*fields)


def _numpy(kind: str, value: Any) -> Any:
    import numpy as np

    return getattr(np, kind)(value)


GOOD: dict[str, tuple[Callable[[], Any], float]] = {
    "int": (lambda: 3, 3.0),
    "bool": (lambda: True, 1.0),
    "minus zero": (lambda: -0.0, 0.0),
    "Decimal": (lambda: Decimal("0.5"), 0.5),
    "Fraction": (lambda: Fraction(-3, 4), -0.75),
    "numpy float32": (lambda: _numpy("float32", 0.25), 0.25),
    "numpy int8": (lambda: _numpy("int8", -5), -5.0),
    "numpy bool": (lambda: _numpy("bool_", True), 1.0),
    "numpy array of one": (lambda: _numpy("array", 2.0), 2.0),
    "smallest": (lambda: 5e-324, 5e-324),
    "largest": (lambda: -1e15, -1e15),
    "index": (lambda: Strange(lambda: 7.0), 7.0),
    "mapping": (lambda: {"score": 2, "prediction": 5, "correct": 0}, 2.0),
    "verdict": (lambda: _verdict(1, 2, 3), 1.0),
    "verdict of own text": (lambda: _verdict(1, StrangeText("x"), []), 1.0),
    "long prediction": (lambda: {"score": 1, "prediction": "x" * 3_000_000}, 1.0),
    "surrogate": (lambda: {"score": 1, "prediction": "\ud83d"}, 1.0),
    "nested prediction": (lambda: {"score": 1, "prediction": _deep(50)}, 1.0),
}
"""Values that are a score, with it."""

BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "1.0",
    "bytes": lambda: b"1",
    "bytearray": lambda: bytearray(b"1"),
    "complex": lambda: 1j,
    "NaN": lambda: float("nan"),
    "infinity": lambda: -float("inf"),
    "beyond float32": lambda: 1e39,
    "beyond squares": lambda: 1.1e15,
    "many digits": lambda: 10**5000,
    "Decimal beyond": lambda: Decimal("1e400"),
    "Decimal NaN": lambda: Decimal("sNaN"),
    "Fraction beyond": lambda: Fraction(10**400, 3),
    "list": lambda: [1.0],
    "deep list": lambda: _deep(100_000),
    "endless list": lambda: (lambda one: one.append(one) or one)([]),  # type: ignore[func-returns-value]
    "generator": lambda: (value for value in (1.0,)),
    "class": lambda: float,
    "nameless": Nameless,
    "empty mapping": dict,
    "mapping without score": lambda: {StrangeText("scores"): 1},
    "mapping of text": lambda: {"score": "1"},
    "mapping that raises": StrangeMap,
    "prediction that raises": lambda: {"score": 1, "prediction": Strange(lambda: _raise(OSError("no")))},
    "prediction of many digits": lambda: {"score": 1, "prediction": 10**5000},
    "prediction of endless depth": lambda: {"score": 1, "prediction": _deep(100_000)},
    "correct that raises": lambda: {"score": 1, "correct": Strange(lambda: _raise(StrangeError()))},
    "verdict of nothing": lambda: _verdict(None),
    "number that raises": lambda: Strange(lambda: _raise(ValueError("no number"))),
    "number that interrupts": lambda: Strange(lambda: _raise(KeyboardInterrupt())),
    "number that exits": lambda: Strange(lambda: sys.exit(0)),
    "number that is none": lambda: Strange(lambda: "text"),
    "numpy array of two": lambda: _numpy("array", [1.0, 2.0]),
    "numpy text": lambda: _numpy("str_", "1"),
    "coroutine": lambda: asyncio.sleep(0),
}
"""Values that are none."""

_WITHOUT_ARGUMENTS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(kind, UnicodeError | BaseExceptionGroup | GeneratorExit)
]

RAISED: dict[str, Callable[[], BaseException]] = {
    **{kind.__name__: kind for kind in _WITHOUT_ARGUMENTS},
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "TimeoutError of asyncio": TimeoutError,
    "group": lambda: ExceptionGroup("several", [ValueError(1), StrangeError()]),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "strange error": StrangeError,
    "strange base": StrangeBase,
    "strange text": lambda: ValueError(StrangeText("text")),
    "surrogate in text": lambda: ValueError("\ud83d"),
    "long text": lambda: ValueError("x" * 5_000_000),
    "many lines": lambda: ValueError("\n" * 10_000 + "\x00\x1b[31m"),
    "exit with text": lambda: SystemExit("bye"),
    "exit with an object": lambda: SystemExit(Strange(lambda: _raise(ValueError()))),
}


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1) + 1


def _exhaust() -> Any:
    """Allocates within a limit of its own, which is lifted afterwards."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), before[1]))
    try:
        return len(bytearray(1 << 30))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _flood() -> float:
    for _ in range(200):
        print("printed by a reward function " * 40)
        print("and by its errors " * 40, file=sys.stderr)
    return 1.0


def _threads() -> float:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        threading.Thread(target=_raise, args=(ValueError("in a thread"),)).start()
    return 1.0


def _child(**settings: Any) -> float:
    subprocess.Popen(["sleep", "90"], **settings)
    return 1.0


def _fork(in_child: Callable[[], Any], session: bool = False) -> float:
    if os.fork() == 0:
        if session:
            os.setsid()
        return float(in_child())
    return 1.0


def _multiprocessing() -> float:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return float(pool.map(abs, [-1])[0])


def _untidy() -> float:
    os.chdir("/")
    os.environ.clear()
    gc.disable()
    sys.argv.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    random.seed(0)
    sys.stdout = None  # type: ignore[assignment]
    print("to nobody")
    return 1.0


HARMLESS: dict[str, Callable[[], float]] = {
    "flood the output": _flood,
    "leave threads": _threads,
    "leave a process": _child,
    "leave a process in a session of its own": lambda: _child(start_new_session=True),
    "fork and return": lambda: _fork(lambda: -7),
    "fork and raise": lambda: _fork(lambda: _raise(ValueError("the child's"))),
    "fork and exit": lambda: _fork(lambda: sys.exit(3)),
    "fork and stay": lambda: _fork(lambda: time.sleep(90)),
    "fork and stay in a session": lambda: _fork(lambda: time.sleep(90), session=True),
    "fork a pool": _multiprocessing,
    "be untidy": _untidy,
    "alarm later": lambda: (signal.setitimer(signal.ITIMER_REAL, 0.02) and 1.0) or 1.0,
    "close what is not there": lambda: os.closerange(200, 300) or 1.0,  # type: ignore[func-returns-value]
}
"""What costs nobody a score: the function returns 1."""

CAUGHT: dict[str, Callable[[], Any]] = {
    "recurse": _recurse,
    "exhaust memory": _exhaust,
    "open too many files": lambda: [open(os.devnull) for _ in range(10**6)],  # noqa: SIM115
}
"""What Python turns into an exception."""

_FATAL = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR1")


def _signal(name: str) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), signal.Signals[name]) or time.sleep(90)  # type: ignore[func-returns-value]


def _write_everywhere() -> float:
    for descriptor in range(3, 30):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00" * 64)
    time.sleep(90)
    return 1.0


DEADLY: dict[str, Callable[[], Any]] = {
    **{f"send itself {name}": _signal(name) for name in _FATAL},
    **{f"end with {code}": functools.partial(os._exit, code) for code in (0, 1, 3, 70, 255)},
    "read address 0": lambda: ctypes.string_at(0),
    "close all descriptors": lambda: os.closerange(0, 256) or 1.0,  # type: ignore[func-returns-value]
    "close its output": lambda: os.close(1) or 1.0,  # type: ignore[func-returns-value]
    "replace its errors": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2) and 1.0,
    "write everywhere": _write_everywhere,
    "kill its group": lambda: os.killpg(0, signal.SIGKILL),
}
"""What costs the process and is the function's own fault."""

SLOW: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(90),
    "spin": lambda: [None for _ in iter(int, 1)],
    "stop itself": _signal("SIGSTOP"),
    "catch everything": lambda: _for_ever(),
    "number that hangs": lambda: Strange(lambda: time.sleep(90)),
    "wait for a child": lambda: subprocess.run(["sleep", "90"], start_new_session=True, check=False),
}
"""What ends with the limit of time."""


def _for_ever() -> None:
    while True:
        try:
            time.sleep(90)
        except BaseException:  # noqa: BLE001
            continue


OUTSIDE = ("killed from outside", "terminated from outside", "stopped and continued", "stopped for good")
"""What others do to the worker: the sample is scored all the same."""

KINDS: dict[str, Mapping[str, Any]] = {
    "good": GOOD,
    "bad": BAD,
    "raised": RAISED,
    "harmless": HARMLESS,
    "caught": CAUGHT,
    "deadly": DEADLY,
    "slow": SLOW,
    "outside": dict.fromkeys(OUTSIDE),
}
_WEIGHTS = {"good": 30, "bad": 40, "raised": 60, "harmless": 20, "caught": 5, "deadly": 10, "slow": 2, "outside": 3}


def _do(kind: str, what: str, marker: str) -> Any:
    """What an odd sample does."""
    if kind == "good":
        return GOOD[what][0]()
    if kind == "raised":
        raise RAISED[what]()
    if kind == "outside":
        if not os.path.exists(marker):
            Path(f"{marker}.new").write_text(str(os.getpid()))
            os.rename(f"{marker}.new", marker)
            time.sleep(0.3)
        return 1.0
    return KINDS[kind][what]()


def odd(response: str, kind: str, what: str, marker: str) -> Any:
    """The reward function: an odd response does ``what``, another one's score is its length."""
    return _do(kind, what, marker) if response == "odd" else float(len(response))


async def odd_async(response: str, kind: str, what: str, marker: str) -> Any:
    """The same as an async function."""
    await asyncio.sleep(0)
    value = _do(kind, what, marker) if response == "odd" else float(len(response))
    await asyncio.sleep(0)
    return value


# Running them.


def run(count: int, seed: int) -> list[dict[str, Any]]:
    """One record a case: what was done, how it came out, and what was wrong with that (empty: nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(count, random.Random(seed), Path(folder)))


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often each kind came out how, and every case with which something was wrong."""
    counts: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        outcomes = Counter(record["outcome"] for record in records if record["kind"] == kind)
        counts[kind] = dict(sorted(outcomes.items()))
    different = {(record["kind"], record["what"], record["mode"]) for record in records}
    return {
        "cases": len(records),
        "different": len(different),
        "outcomes": counts,
        "slowest seconds": max((record["seconds"] for record in records), default=0.0),
        "wrong": [dict(record) for record in records if record["wrong"]],
    }


async def _run(count: int, rng: random.Random, folder: Path) -> list[dict[str, Any]]:
    from contextlib import AsyncExitStack

    from rljob_api.spec.reward import Reward
    from rljob_trainer.rewards.pool import RewardPool

    records = []
    async with AsyncExitStack() as stack:
        pools = {}
        for mode, function in (("plain", "odd"), ("async", "odd_async")):
            for on_error in ("fail", "score"):
                spec = Reward.model_validate(
                    {
                        "functions": [{"type": "custom", "function": f"{__name__}:{function}", "name": "it"}],
                        "timeoutSeconds": TIMEOUT_SECONDS,
                        "workers": 1,
                        "onError": on_error,
                        "errorScore": -99,
                    }
                )
                pool = RewardPool(spec, longest_response=10, paths=[HERE.parents[1]])
                pools[mode, on_error] = await stack.enter_async_context(pool)
        for number in range(count):
            kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            what = rng.choice(list(KINDS[kind]))
            mode, on_error = rng.choice(("plain", "plain", "async")), rng.choice(("fail", "score"))
            case = {"number": number, "kind": kind, "what": what, "mode": mode, "onError": on_error}
            texts = ["x" * rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
            texts.insert(rng.randint(0, len(texts)), "odd")
            records.append(await _case(case, texts, pools[mode, on_error], folder / str(number)))
        pids = [pid for pool in pools.values() for pid in pool.worker_pids]
    if left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        records[-1]["wrong"] = f"{records[-1]['wrong']} workers {left} are left".strip()
    return records


async def _case(case: dict[str, Any], texts: Sequence[str], pool: RewardPool, marker: Path) -> dict[str, Any]:
    """Scores a case's samples, and after them two plain ones by the same pool."""
    columns = {"kind": case["kind"], "what": case["what"], "marker": str(marker)}
    began = time.monotonic()
    meddling = asyncio.create_task(_meddle(case["what"], pool, marker)) if case["kind"] == "outside" else None
    try:
        async with asyncio.timeout(_CASE_SECONDS):
            outcome, wrong = await _scored(case, _responses(texts, columns), pool)
            after = await pool.score_responses(_responses(["a", "bb"], columns))
            if [result.score for result in after] != [1.0, 2.0]:
                wrong += f" the samples after it got {[result.score for result in after]}"
    except TimeoutError:
        outcome, wrong = "hung", f"no end within {_CASE_SECONDS:g} s"
    except Exception as problem:  # noqa: BLE001  what reaches the driver as a traceback
        outcome, wrong = "traceback", f"{type(problem).__name__}: {problem!s:.300}"
    if meddling is not None:
        meddling.cancel()
    return {**case, "outcome": outcome, "seconds": round(time.monotonic() - began, 1), "wrong": wrong.strip()}


async def _scored(case: Mapping[str, Any], responses: Sequence[Response], pool: RewardPool) -> tuple[str, str]:
    """The outcome, and what is wrong with it."""
    from rljob_trainer.errors import RLJobError

    kind, what = case["kind"], case["what"]
    good = GOOD[what][1] if kind == "good" else 1.0
    allowed = [RIGHT] if kind in ("good", "harmless", "outside") else [REFUSED]
    wrong = ""
    try:
        results = await pool.score_responses(responses)
    except RLJobError as problem:
        outcome = {65: REFUSED, 75: TRY_AGAIN}.get(problem.exit_code, f"exit code {problem.exit_code}")
        message = str(problem)
    else:
        message = ""
        outcome = RIGHT
        for response, result in zip(responses, results, strict=True):
            if response.response == "odd":
                if result.error is not None:
                    outcome, message = REFUSED, result.error
                elif result.score != good:
                    outcome = f"score {result.score}"
            elif (result.score, result.error) != (float(len(response.response)), None):
                wrong += f" {response.label} got {result.score}: {result.error!s:.200}"
    if outcome in (REFUSED, TRY_AGAIN):
        odd_one = next(response.label for response in responses if response.response == "odd")
        if f"'it' ({__name__}:" not in message or f" failed on {odd_one}: " not in message:
            wrong += f" the message names another function or sample: {message:.300}"
        message.encode("utf-8")
    if outcome not in allowed:
        wrong += f" {allowed[0]} was due: {message:.300}"
    return outcome, wrong


def _responses(texts: Sequence[str], columns: Mapping[str, Any]) -> list[Response]:
    from rljob_trainer.rewards.terms import Response

    return [
        Response("What?", text, None, "s", len(text), "stop", columns, label=f"sample {index}")
        for index, text in enumerate(texts)
    ]


async def _meddle(what: str, pool: RewardPool, marker: Path) -> None:
    """Does to the worker that has told its number what somebody else may do to it."""
    while not marker.exists():  # noqa: ASYNC110  (a file of another process)
        await asyncio.sleep(0.01)
    pid = int(marker.read_text())
    number = {"killed from outside": signal.SIGKILL, "terminated from outside": signal.SIGTERM}.get(
        what, signal.SIGSTOP
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        if what == "stopped and continued":
            await asyncio.sleep(0.9)
            os.kill(pid, signal.SIGCONT)

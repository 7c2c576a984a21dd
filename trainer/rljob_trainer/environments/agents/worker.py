"""A process that runs a user's agent function.

    python -P -B worker.py MODULE:FUNCTION FOLDER PARAMS

Says first whether the function is there. Then it reads a line of JSON for each episode from standard input (``number``,
``task``, ``client``) and answers each with a line on standard output, which has its number; a line ``cancel`` ends one.
An ``async`` function plays as many at once as are asked for, any other one after the other. What the function prints
goes to standard error. Knows nothing of rljob, so that the function finds the interpreter as a script would. Standard
library only.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

_LOST = 75
"""EX_TEMPFAIL of sysexits.h: something that the agent needs is not there, and it should be tried again."""
_LINE_BYTES = 1 << 26

UserFunction = Callable[..., Any]
Answer = dict[str, Any]


def main() -> None:
    named, folder, params = sys.argv[1:]
    incoming, outgoing = _take_over_streams()
    sys.path.insert(0, folder)
    module, _, name = named.partition(":")
    try:
        function = _found(module, name)
    except (Exception, SystemExit) as problem:  # noqa: BLE001  a module of others may raise anything
        _tell(outgoing, {"problem": _said(problem)})
        return
    given = json.loads(params)
    concurrent = inspect.iscoroutinefunction(function)
    _tell(outgoing, {"ready": True, "concurrent": concurrent})
    if concurrent:
        asyncio.run(_play_many(function, given, incoming, outgoing))
    else:
        _play_in_turn(function, given, incoming, outgoing)


def _found(module: str, name: str) -> UserFunction:
    found = vars(importlib.import_module(module))
    if name not in found:
        raise AttributeError(f"{module} has no {name}")
    if not callable(found[name]):
        raise TypeError(f"{name} is not a function")
    function: UserFunction = found[name]
    return function


def _play_in_turn(function: UserFunction, params: Answer, incoming: TextIO, outgoing: TextIO) -> None:
    for line in incoming:
        given = json.loads(line)
        try:
            answer = _returned(function(given["task"], given["client"], **params))
        except BaseException as problem:  # noqa: BLE001  whatever it is, it is the function's
            answer = _failed(problem)
        _tell(outgoing, {"number": given["number"], **answer})


async def _play_many(function: UserFunction, params: Answer, incoming: TextIO, outgoing: TextIO) -> None:
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), incoming)
    running: dict[int, asyncio.Task[None]] = {}

    async def play(given: Answer) -> None:
        try:
            answer = _returned(await function(given["task"], given["client"], **params))
        except BaseException as problem:  # noqa: BLE001  whatever it is, it is the function's
            answer = _failed(problem)
        _tell(outgoing, {"number": given["number"], **answer})
        del running[given["number"]]

    while line := await lines.readline():
        given = json.loads(line)
        if "cancel" in given:
            if given["cancel"] in running:
                running[given["cancel"]].cancel()
            else:
                _tell(outgoing, {"number": given["cancel"]})
            continue
        running[given["number"]] = asyncio.create_task(play(given))
    os._exit(0)  # the driver is gone, and nobody waits for what still runs


def _returned(returned: Any) -> Answer:
    """Raises ``TypeError`` or ``ValueError`` for what JSON cannot hold."""
    answer = {"returned": returned}
    json.dumps(answer)
    return answer


def _failed(problem: BaseException) -> Answer:
    if isinstance(problem, SystemExit) and problem.code == _LOST:
        return {"lost": f"it ended with the exit code {_LOST}"}
    return {"raised": _said(problem), "traceback": "".join(traceback.format_exception(problem))}


def _said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _tell(outgoing: TextIO, answer: Answer) -> None:
    outgoing.write(json.dumps(answer) + "\n")
    outgoing.flush()


def _take_over_streams() -> tuple[TextIO, TextIO]:
    """Moves the two pipes out of the function's reach: it reads nothing, and prints to standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing


if __name__ == "__main__":
    main()

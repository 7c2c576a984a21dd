"""A process that runs a user's agent function, one episode after the other.

    python -P -B worker.py MODULE:FUNCTION FOLDER PARAMS

Reads a line of JSON for each episode from standard input (``task``, ``client``, ``variables``) and answers with one on
standard output; what the function prints goes to standard error. Knows nothing of rljob, so that the function finds the
interpreter as a script would. Standard library only.
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
    _tell(outgoing, {"ready": True})
    for line in incoming:
        given = json.loads(line)
        os.environ.update(given["variables"])
        _tell(outgoing, _played(function, given["task"], given["client"], json.loads(params)))


def _found(module: str, name: str) -> Callable[..., Any]:
    found = vars(importlib.import_module(module))
    if name not in found:
        raise AttributeError(f"{module} has no {name}")
    if not callable(found[name]):
        raise TypeError(f"{name} is not a function")
    function: Callable[..., Any] = found[name]
    return function


def _played(function: Callable[..., Any], task: Any, client: Any, params: dict[str, Any]) -> dict[str, Any]:
    try:
        returned = function(task, client, **params)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        answer = {"returned": returned}
        json.dumps(answer)
        return answer
    except SystemExit as exit:
        if exit.code == _LOST:
            return {"lost": f"it ended with the exit code {_LOST}"}
        return {"raised": f"SystemExit: {exit.code}", "traceback": traceback.format_exc()}
    except BaseException as problem:  # noqa: BLE001  whatever it is, it is the function's
        return {"raised": _said(problem), "traceback": traceback.format_exc()}


async def _awaited(returned: Any) -> Any:
    return await returned


def _said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _tell(outgoing: TextIO, answer: dict[str, Any]) -> None:
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

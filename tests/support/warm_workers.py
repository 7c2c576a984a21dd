"""A process that has imported what ranks and engines import, and forks one for every worker that Ray starts in a test.

An actor's process of its own takes six seconds of CPU time until it has done that: an interpreter for Ray's set-up, a
second one for the worker, and then torch, transformers and our code. What a tiny run is tested for takes no longer.
From there on it is the same: Ray's own worker program with its own arguments, environment, folder and output, known to
Ray by its own number. What all forks have in common is the seed of Python's hashes, and that they are not below the
raylet in the tree of processes, but below the process that forks.

Started with `python warm_workers.py serve FD FD` this file is the process that forks (``forking``); a process that has
imported all of that already forks it off (``fork_off``). With a worker's command line this file is what Ray starts in
place of its own set-up: it hands over what it was given, and lasts as long as the fork.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ADDRESS = "RLJOB_TEST_WORKERS"
"""Where the process that forks listens, in the environment of every raylet; an @ stands for an abstract name's zero."""
WITH_AGENT = "RLJOB_TEST_WITH_AGENT"
"""Set where a test looks at the agent of Ray's dashboard, which others do without."""
_LONGEST = 1 << 20
_PR_SET_PDEATHSIG = 1
_AGENT = "--dashboard_agent_command="
_OF_RAY = ("google.protobuf.internal.builder", "google.protobuf.json_format", "jsonschema", "msgpack", "requests")
"""What Ray imports of others: a third of what its own import takes. They look at nothing that differs from process to
process."""


@contextmanager
def forking(folder: str) -> Iterator[str]:
    """There is a process that forks, in a private ``folder`` whose path is short; yields its address."""
    import subprocess

    address = os.path.join(folder, "workers")
    alive, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, theirs:
        listening.bind(address)
        listening.listen(64)  # who comes before everything is imported waits
        process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listening.fileno()), str(theirs.fileno())],
            # As in Ray's own workers; each fork gets the environment of the worker that it is.
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": folder},
            stdin=subprocess.DEVNULL,
            pass_fds=[listening.fileno(), theirs.fileno()],
        )
    try:
        yield address
    finally:
        alive.close()
        process.wait()


def fork_off() -> str | None:
    """Forks a process that forks, which ends with this one; its address. In a worker: None, when that is over."""
    import ctypes
    import signal

    address, parent = f"@rljob-test-workers-{os.getpid()}", os.getpid()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address.replace("@", "\0"))
    listening.listen(64)
    if os.fork():
        listening.close()
        return address
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    alive, other = socket.socketpair()
    if os.getppid() != parent:
        os._exit(0)
    order = serve(listening, alive)
    other.close()
    become(order)
    return None


def import_what_ray_does() -> None:
    """But not Ray, whose compiled part notes the environment when it is imported: job and node are in there."""
    import importlib

    for name in _OF_RAY:
        importlib.import_module(name)
    assert "ray" not in sys.modules


def compute_what_all_do(*, forks_are_brief: bool = False) -> None:
    """What a fork would otherwise compute for itself, a second of CPU time: the names by which transformers knows the
    weights of all its models, and a look by the garbage collector at all that is imported, which besides copies it.

    ``forks_are_brief``: what exists now stays with them for good, and so does what one of them freezes itself.
    """
    import gc

    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()
    if forks_are_brief:
        gc.unfreeze = _leave_frozen


def _leave_frozen() -> None:
    """In place of ``gc.unfreeze``."""


def fork_workers(address: str) -> None:
    """Rays that this process starts from now on have workers that the process at ``address`` forks."""
    import inspect
    from unittest.mock import patch

    from ray._private import services

    usual, starting = services.start_raylet, services.start_ray_process

    def without_an_agent(command: list[str], *said: Any, **named: Any) -> Any:
        return starting([_no_agent(part) if part.startswith(_AGENT) else part for part in command], *said, **named)

    parameters = inspect.signature(usual)

    def start_raylet(*said: Any, **named: Any) -> Any:
        given = parameters.bind(*said, **named)
        given.arguments["setup_worker_path"] = __file__
        started = starting if os.environ.get(WITH_AGENT) else without_an_agent
        with patch.dict(os.environ, {_ADDRESS: address}), patch.object(services, "start_ray_process", started):
            return usual(*given.args, **given.kwargs)

    services.start_raylet = start_raylet


def _no_agent(option: str) -> str:
    """The raylet's option that says how its agent is started, for the one that stands in its place."""
    import shlex
    import subprocess

    command = shlex.split(option.removeprefix(_AGENT))
    said = dict(part.removeprefix("--").split("=", 1) for part in command if part.startswith("--") and "=" in part)
    stands = [sys.executable, "-IS", os.path.join(os.path.dirname(__file__), "no_agent.py")]
    return _AGENT + subprocess.list2cmdline([*stands, said["session-dir"], said["node-id"]])


def stand_for_a_worker(options: list[str]) -> None:
    """``options``: a program of Ray's, its arguments, and among them those for Ray's set-up."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    said, command = parser.parse_known_args(options)
    environment = dict(os.environ)
    address = environment.pop(_ADDRESS)
    order = {
        "command": command,
        "env": environment,
        "changes": json.loads(said.serialized_runtime_env_context).get("env_vars") or {},
        "cwd": os.getcwd(),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address.replace("@", "\0"))
    socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
    connection.recv(1)


def serve(listening: socket.socket, alive: socket.socket) -> dict[str, Any]:
    """Forks for everyone who connects, until the other end of ``alive`` is closed; the connection stays open as long as
    the fork lives. In that it returns what was said."""
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Ray asks nobody how they ended: none stays a zombie
    while True:
        ready, _, _ = select.select([listening, alive], [], [])
        if alive in ready:
            os._exit(0)
        connection, _ = listening.accept()
        said, files, _, _ = socket.recv_fds(connection, _LONGEST, 3)
        if said and os.fork() == 0:
            break
        connection.close()
        for file in files:
            os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # whoever ends the worker's process group, as Ray does, must not end ours
    listening.close()
    alive.close()
    connection.detach()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    order: dict[str, Any] = json.loads(said)
    return order


def become(order: dict[str, Any]) -> None:
    """What Ray's set-up and the interpreter do before the worker's first line."""
    import random
    import runpy

    import numpy as np

    os.environ.clear()
    os.environ.update(order["env"])
    for name, value in order["changes"].items():
        os.environ[name] = os.path.expandvars(value)
    os.chdir(order["cwd"])
    program, *arguments = order["command"]
    sys.path[0] = os.path.dirname(program)
    sys.argv = [program, *arguments]
    # Generators that nobody seeds differ from process to process.
    random.seed()
    np.random.seed()
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    if sys.argv[1] != "serve":
        stand_for_a_worker(sys.argv[1:])
        return
    # What ranks and engines import, down to the models that random weights make.
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import rljob_trainer.learner.rank
    import rljob_trainer.rollout.actor
    import rljob_trainer.rollout.torch_engine  # noqa: F401

    import_what_ray_does()
    compute_what_all_do()
    become(serve(*(socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[2:4])))


if __name__ == "__main__":
    main()

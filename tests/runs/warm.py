"""A process that has imported what a driver imports, and forks one for every run that a test starts.

An interpreter of its own takes four seconds of CPU time until it has done that, a third of what a tiny run needs in
all. From there on it is the same: a process of its own with its own arguments, environment, folder and output, which
ends as an interpreter ends. What all forks have in common is the seed of Python's hashes: of runs that are compared bit
by bit one is started otherwise (``Runner.start(..., cold=True)``). The run's learner and engines come out of forks too:
of the run's own process, before it did anything (``warm_workers``).

Started with `python warm.py FD` this file is that process, whose orders come through the socket FD.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_LONGEST = 1 << 20
_STARTING_SECONDS = 300.0
"""The first order waits until everything is imported, on a machine that may be busy."""
_ENDING_SECONDS = 10.0
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
"""Of Linux's sched.h; Python has them from 3.12 on."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
"""What the libraries look at while they are imported, as every run has it."""


class Forked:
    """A run's process, with what tests ask of a ``subprocess.Popen``: its number is its own until it is polled."""

    def __init__(self, warm: Warm, pid: int, printed: Path) -> None:
        self.pid, self.printed = pid, printed
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        if self.returncode is None:
            self._warm.listen(0.0)
            self.returncode = self._warm.end_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            self._warm.listen(left)
        return code

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.printed.read_text(), ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """Starts the process that forks, and ends it."""

    def __init__(self, home: Path, *, vllm: bool = False) -> None:
        """``vllm``: what its engine imports too, for which an interpreter takes twenty seconds of CPU time more."""
        self._home, self._vllm = home, vllm
        self._began: list[int] = []
        self._ended: dict[int, int] = {}
        """Exit codes by process, negative for a signal."""
        self._gone: set[int] = set()

    def __enter__(self) -> Warm:
        self._orders, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno()), *(["vllm"] if self._vllm else [])],
                env={**os.environ, **_ENVIRONMENT, "HOME": str(self._home)},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._orders.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(
        self,
        program: Sequence[str],
        arguments: Sequence[str],
        printed: Path,
        *,
        env: Mapping[str, str],
        cwd: Path,
        workers: bool = True,
        mounts: bool = False,
    ) -> Forked:
        """``program`` is ``-m`` and a module, ``-c`` and its text, or a file; its first arguments may follow.
        ``workers``: those of its Ray are forked too. ``mounts``: what it mounts it and its workers see alone."""
        order = {
            "program": [*program],
            "arguments": [*arguments],
            "env": {**env},
            "cwd": str(cwd),
            "workers": workers,
            "mounts": mounts,
        }
        with printed.open("w") as file:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [file.fileno()])
        deadline = time.monotonic() + _STARTING_SECONDS
        while not self._began:  # news of others may come first
            left = deadline - time.monotonic()
            assert left > 0, f"the process that forks did not answer within {_STARTING_SECONDS:g} s"
            self.listen(left)
        return Forked(self, self._began.pop(), printed)

    def end_of(self, pid: int) -> int | None:
        """The exit code of a process that has ended, which then is gone altogether."""
        code = self._ended.pop(pid, None)
        if code is not None:
            self._orders.send(json.dumps({"reap": pid}).encode())
            while pid not in self._gone:
                self.listen(None)
            self._gone.remove(pid)
        return code

    def listen(self, seconds: float | None) -> None:
        """Waits for news at most so long."""
        while select.select([self._orders], [], [], seconds)[0]:
            news = self._orders.recv(_LONGEST)
            assert news, "the process that forks has ended"
            kind, pid, code = json.loads(news)
            if kind == "began":
                self._began.append(pid)
            elif kind == "ended":
                self._ended[pid] = code
            else:
                self._gone.add(pid)
            seconds = 0.0


def serve(orders: socket.socket) -> tuple[dict[str, Any], int]:
    """Forks for every order, for ever; in the fork it returns the order and where to print."""
    # Whoever waits below is woken by the end of a child.
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            os.read(woken, _LONGEST)
            for pid, code in ended(running):
                running.remove(pid)
                orders.send(json.dumps(["ended", pid, code]).encode())
        if orders not in ready:
            continue
        text, files, _, _ = socket.recv_fds(orders, _LONGEST, 1)
        if not text:
            os._exit(0)
        order = json.loads(text)
        if "reap" in order:
            os.waitpid(order["reap"], 0)
            orders.send(json.dumps(["gone", order["reap"], None]).encode())
        elif pid := os.fork():
            os.close(files[0])
            running.add(pid)
            orders.send(json.dumps(["began", pid, None]).encode())
        else:
            break
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (woken, wake):
        os.close(descriptor)
    orders.close()
    return order, files[0]


def ended(running: set[int]) -> list[tuple[int, int]]:
    """Those that have ended, and their exit codes; they stay zombies until somebody wants to know."""
    found = []
    for pid in running:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            found.append((pid, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))
    return found


def become(order: dict[str, Any], printed: int) -> None:
    """What the interpreter does before a program's first line."""
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    os.close(printed)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if order["mounts"]:
        own_mounts()
    if order["workers"]:
        address = warm_workers.fork_off()
        if address is None:
            return
        warm_workers.fork_workers(address)
    kind, *given = [*order["program"], *order["arguments"]]
    code = given.pop(0) if kind in ("-m", "-c") else Path(kind).read_text()
    sys.path[0] = {"-m": order["cwd"], "-c": ""}.get(kind, str(Path(kind).parent))
    sys.argv = [kind, *given]
    if kind == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>" if kind == "-c" else kind, "exec"), main.__dict__)


def own_mounts() -> None:
    """From now on this process and its children mount for themselves alone (`unshare --mount`), as root of a user
    namespace where the user is not root."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "no namespace of mounts")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    import warm_workers

    sys.path.pop(0)
    # What `rljob run`, `drive`, `eval` and `export` import, and learner and engines, down to the models that random
    # weights make, and what a run imports while it begins, as far as that does not import Ray.
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import rljob_trainer.commands.drive
    import rljob_trainer.commands.eval
    import rljob_trainer.commands.export
    import rljob_trainer.commands.run
    import rljob_trainer.driver.closing
    import rljob_trainer.driver.critics
    import rljob_trainer.driver.ending
    import rljob_trainer.driver.feeding
    import rljob_trainer.driver.gpus
    import rljob_trainer.driver.local_ray
    import rljob_trainer.driver.ray_beside
    import rljob_trainer.environments.agents
    import rljob_trainer.learner.cpu.side_by_side
    import rljob_trainer.learner.rank
    import rljob_trainer.publish.held_weights
    import rljob_trainer.publish.quiet
    import rljob_trainer.record.boundary
    import rljob_trainer.record.resuming
    import rljob_trainer.record.same_job
    import rljob_trainer.record.start_model
    import rljob_trainer.record.unfinished
    import rljob_trainer.record.weights
    import rljob_trainer.rewards.pool
    import rljob_trainer.rollout.actor
    import rljob_trainer.rollout.torch_engine
    import rljob_trainer.telemetry.names
    import rljob_trainer.telemetry.open_view
    import rljob_trainer.telemetry.sinks
    import rljob_trainer.telemetry.trackers
    import rljob_trainer.training.step
    import rljob_trainer.validation.validator
    import rljob_trainer.weights.learner_side

    if sys.argv[2:] == ["vllm"]:
        from rljob_trainer.rollout.vllm_arguments import environment

        # What every engine on CPUs sets before the import, which reads it. Ray comes after the fork (below); that vLLM
        # believes there is none changes nothing, since our engines say where their workers run.
        sys.modules["ray"] = None  # type: ignore[assignment]
        os.environ |= environment(os.environ, on_cpu=True, start_seconds=600.0, tells_experts=False)
        import vllm.model_executor.models.llama
        import vllm.model_executor.models.qwen2
        import vllm.v1.engine.core
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401

        import rljob_trainer.rollout.vllm_core
        import rljob_trainer.rollout.vllm_engine
        import rljob_trainer.rollout.vllm_transfer  # noqa: F401

        del sys.modules["ray"]
    warm_workers.import_what_ray_does()
    warm_workers.compute_what_all_do(forks_are_brief=True)
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))

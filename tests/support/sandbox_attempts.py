"""Runs the attempts of tests/trainer/world/sandbox/attempts in one mode, and says what became of each.

    python sandbox_attempts.py MODE [forbid namespaces]

Prints JSON: for each attempt the cell of docs/sandbox.md's table, and what the program said. A process of its own, so
that it can be started as somebody without any right."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import LocalSandbox, Mode, ProgramResult, SandboxLimits

ATTEMPTS = Path(os.environ.get("RLJOB_ATTEMPTS", Path(__file__).parents[1] / "trainer/world/sandbox/attempts"))
HELPER = "attempt.py"
NEXT = ".next.py"
LIMITS = SandboxLimits(
    wall_seconds=15.0,
    cpu_seconds=10.0,
    memory_bytes=128 * 2**20,
    processes=16,
    output_bytes=65536,
    file_bytes=32 * 2**20,
)
ENDLESS = ("busy_loop", "fork_bomb", "ignored_signals", "sleep")
"""They wait for the limit of time, or, for the fork bomb, until they are found: it is short for them."""
VICTIM = """
import sys
held = bytearray(b"SECRETS!" * 2)
import ctypes
print(ctypes.addressof(ctypes.c_char.from_buffer(held)), flush=True)
sys.stdin.read()
"""

THROUGH, REFUSED, NOTHING, ENDED = "**got through**", "refused", "nothing there", "ended"
HALF = "4f1c0de5ca1ab1e9"


def names() -> list[str]:
    return sorted(path.stem for path in ATTEMPTS.glob("*.py") if path.name != HELPER and not path.name.endswith(NEXT))


def what(name: str) -> str:
    """The attempt's first line, which says what it tries."""
    return (ATTEMPTS / f"{name}.py").read_text().splitlines()[0].strip('"').rstrip(".")


@contextmanager
def machine() -> Iterator[dict[str, Any]]:
    """Servers, files and a process to get at, of the caller's user; where they are."""
    folder = Path(tempfile.mkdtemp(prefix="attempts-"))
    folder.chmod(0o777)
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        outside = folder / "outside"
        outside.mkdir()
        outside.chmod(0o777)
        for name, mode in (
            ("private", 0o600),
            ("public", 0o644),
            ("own", 0o600),
            ("writable", 0o666),
            ("deletable", 0o666),
        ):
            (outside / name).write_text("SECRET")
            (outside / name).chmod(mode)
        (folder / "account").mkdir()
        (folder / "account" / "token").write_text("SECRET")
        abstract = f"attempts-{os.getpid()}"
        tcp = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, hidden = (closing.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        unix.bind(str(folder / "unix"))
        hidden.bind("\0" + abstract)
        (folder / "unix").chmod(0o777)
        for server in (tcp, unix, hidden):
            server.listen(8)
            threading.Thread(target=_greet, args=(server,), daemon=True).start()
        udp = closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        threading.Thread(target=_echo, args=(udp,), daemon=True).start()
        datagrams = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagrams.bind(str(folder / "unix.datagrams"))
        (folder / "unix.datagrams").chmod(0o777)
        command = [sys.executable, "-c", VICTIM]
        environment = {**os.environ, "SECRET": "SECRET"}
        pipe = subprocess.PIPE
        victim = closing.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True))
        assert victim.stdout is not None
        yield {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": str(folder / "unix"),
            "abstract": abstract,
            "victim": victim.pid,
            "address": int(victim.stdout.readline()),
            **{name: str(outside / name) for name in ("private", "public", "own", "writable", "deletable")},
            "outside": str(outside),
            "account": str(folder / "account"),
            "name": abstract,
            "half": HALF,
        }


async def attempts(mode: Mode) -> dict[str, tuple[str, str]]:
    """For each attempt the cell, and what it said."""
    os.environ["SECRET"] = "SECRET"
    helper = (ATTEMPTS / HELPER).read_text()
    with machine() as facts:
        files = {HELPER: helper, "facts.json": json.dumps(facts)}

        async with (
            LocalSandbox(mode, LIMITS, workers=1) as sandbox,
            LocalSandbox(mode, replace(LIMITS, wall_seconds=0.5), workers=2) as short,
        ):

            async def one(name: str) -> tuple[str, str]:
                source = (ATTEMPTS / f"{name}.py").read_text()
                following = ATTEMPTS / f"{name}{NEXT}"
                if not following.exists():
                    return cell(await (short if name in ENDLESS else sandbox).run(source, "", files))
                # There is one worker: the second program comes where the first was.
                first = await sandbox.run(source, HALF + HALF[::-1], {HELPER: helper})
                assert first.succeeded, first
                return cell(await sandbox.run(following.read_text(), "", files))

            endless = asyncio.gather(*map(one, ENDLESS))
            found = {}
            for name in names():
                if name not in ENDLESS:
                    try:
                        found[name] = await one(name)
                    except WorldError as error:
                        found[name] = THROUGH, str(error)
            return {**found, **dict(zip(ENDLESS, await endless, strict=True))}


def cell(result: ProgramResult) -> tuple[str, str]:
    said = result.stdout.strip().rpartition("\n")[2]
    if result.outcome != "exited":
        return ENDED, f"{result.outcome}: {said[:100]}"
    for start, shown in (("through:", THROUGH), ("refused:", REFUSED), ("nothing there:", NOTHING)):
        if said.startswith(start):
            return shown, said[:200]
    return f"? exit code {result.exit_code}", (said + result.stderr)[-2000:]


def forbid_namespaces() -> None:
    """As the usual seccomp profile of containers does: no new namespaces, no mounts. Of x86_64."""
    refuse, allow = (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
    code = [(0x20, 0, 0, 0)]
    for number in (272, 308, 165, 166, 161, 155):  # unshare, setns, mount, umount2, chroot, pivot_root
        code += [(0x15, 0, 1, number), refuse]
    code += [(0x15, 0, 1, 435), (6, 0, 0, 0x50026)]  # clone3
    code += [(0x15, 0, 3, 56), (0x20, 0, 0, 16), (0x45, 0, 1, 0x7E020000), refuse, allow]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    held = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(317, 1, 0, program) == 0, os.strerror(ctypes.get_errno())


def _greet(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"SECRET")


def _echo(server: socket.socket) -> None:
    while True:
        try:
            server.sendto(*server.recvfrom(64))
        except OSError:
            return


def main() -> None:
    mode, *more = sys.argv[1:]
    if more:
        forbid_namespaces()
    if mode == "available":
        from rljob_trainer.world.sandbox import mode_available

        print(json.dumps([mode_available("namespaces"), mode_available("landlock"), mode_available("none")]))
        return
    assert mode in ("namespaces", "landlock", "none")
    print(json.dumps(asyncio.run(attempts(mode))))


if __name__ == "__main__":
    main()

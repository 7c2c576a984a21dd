"""Programs in a sandbox: what they get and give, how their ends are named, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
from sandbox_places import MODES, all_gone, below, folder_for_all, skip_unless_available

from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import LocalSandbox, Mode, SandboxLimits
from rljob_trainer.world.sandbox.keeper import landlock
from rljob_trainer.world.sandbox.launch import PREFIX, abandoned

LIMITS = SandboxLimits(wall_seconds=30, memory_bytes=192 * 2**20, processes=12, output_bytes=5000, file_bytes=8 * 2**20)

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("left", flush=True)
time.sleep(1000)
"""


async def _have_been_started(processes: int) -> None:
    """Waits until this process has so many, with those that they have started."""
    while len(below(os.getpid())) < processes:  # noqa: ASYNC110  nobody says it
        await asyncio.sleep(0.01)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    skip_unless_available(chosen)
    return chosen


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_all() as folder:
        yield folder


PROGRAMS = {
    "output": "import sys\nprint('é', input(), sys.stdin.read())\nprint('warned', file=sys.stderr)",
    "name": "print(__name__, __file__.rpartition('/')[2], __import__('sys').argv)",
    "files": "print(ascii(open('words/a.txt', 'rb').read()), sorted(__import__('os').listdir('words')))",
    "error": "def f():\n    return 1 / 0\n\nf()",
    "syntax": "x = = 1",
    "exit code": "import sys\nsys.exit(7)",
    "exit text": "import sys\nsys.exit('no')",
    "interrupted": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *error: print('hooked', error[0].__name__)\n1/0",
    "at exit": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "thread": "import threading, time\nsaid = threading.Event()\nthreading.Thread("
    "target=lambda: (said.wait(), time.sleep(0.05), print(2))).start()\nprint(1)\nsaid.set()",
    "pool": "from concurrent.futures import ThreadPoolExecutor\nprint(ThreadPoolExecutor(2).submit(sum, [1]).result())",
    "destructor": "class A:\n    def __del__(self):\n        print('gone')\na = A()",
    "annotations": "from __future__ import annotations\ndef f(x: nothing): pass\nprint(f.__annotations__)",
    "not annotations": "def f(x: nothing): pass",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
    "asyncio": "import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'slept')))",
    "itself": "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(6*7)']))",
    "children": "import os\nif os.fork() == 0: os._exit(3)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "source": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "dead": "import os\nos._exit(9)",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: print('caught')",
    "abort": "import os\nos.abort()",
}
FILES = {"words/a.txt": "a\r\n\udcff", "words/b.txt": "b"}


@cache
def by_python() -> dict[str, tuple[str, int, list[str]]]:
    """What this interpreter does with each, started for it in a folder with the same files."""
    found = {}
    # Whoever started this may have it ignored, which Python would inherit.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, source in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as place:
            for path, text in {**FILES, "program.py": source}.items():
                Path(place, path).parent.mkdir(exist_ok=True)
                Path(place, path).write_bytes(text.encode(errors="surrogateescape"))
            command = [sys.executable, "-I", "program.py"]
            environment = {"LANG": "C.UTF-8"}
            ended = subprocess.run(command, input=b"one\ntwo", cwd=place, capture_output=True, env=environment)
        found[name] = (ended.stdout.decode(), ended.returncode, _without_paths(ended.stderr.decode()))
    signal.signal(signal.SIGINT, former)
    return found


async def test_a_program_is_as_one_that_python_runs(mode: Mode) -> None:
    async with LocalSandbox(mode, LIMITS) as sandbox:
        results = await asyncio.gather(*(sandbox.run(source, "one\ntwo", FILES) for source in PROGRAMS.values()))
    for name, result in zip(PROGRAMS, results, strict=True):
        stdout, exit_code, stderr = by_python()[name]
        # Python ends itself by the signal where nobody caught it; here nobody waits for that.
        assert (result.stdout, result.exit_code) == (stdout, 130 if name == "interrupted" else exit_code), name
        assert result.outcome == ("killed" if name in ("signal", "abort") else "exited"), name
        assert _without_paths(result.stderr) == stderr, name


def _without_paths(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith("KeyboardInterrupt")]
    return [f"File {line.rpartition('/')[2]}" if line.lstrip().startswith("File ") else line for line in lines]


async def test_the_end_of_a_program_is_named(mode: Mode) -> None:
    ends = {
        "while True: print('x' * 100)": "too much output",
        "x = [0] * 10**12": "out of memory",
        "x = []\nwhile True: x.append(bytearray(b'x' * 2**20))": "out of memory",
        "import time\nfor i in range(9): open(str(i), 'wb').write(bytes(2**20))\ntime.sleep(1000)": "too many files",
        "import sys\nsys.exit(1)": "exited",
    }
    async with LocalSandbox(mode, LIMITS) as sandbox:
        for source, outcome in ends.items():
            result = await sandbox.run(source)
            if outcome == "too many files" and mode == "namespaces":
                # Where its file system is full before that.
                assert "No space left on device" in result.stderr
            else:
                assert result.outcome == outcome, (source, result)
        flood = await sandbox.run("print('é' * 3000)")
        assert flood.truncated
        assert flood.stdout == "é" * 2500, "5,000 bytes of it"
        just = await sandbox.run("print('x' * 4999)")
        assert (just.outcome, len(just.stdout), just.truncated) == ("exited", 5000, False)
    async with LocalSandbox(mode, SandboxLimits(wall_seconds=3, cpu_seconds=3), workers=1) as sandbox:
        assert (await sandbox.run("import time\nprint(1, flush=True)\ntime.sleep(100)")).outcome == "timed out"
        late = await sandbox.run("print(2)")
        assert (late.outcome, late.stdout) == ("exited", "2\n")
    forks = "import os, time\nfor _ in range(99):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)"
    async with LocalSandbox(mode, LIMITS, workers=1) as sandbox:
        bomb = await sandbox.run(forks)
        assert bomb.outcome == "too many processes" or "BlockingIOError" in bomb.stderr, bomb


async def test_time_of_the_processor_is_limited_by_itself() -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: print('on', flush=True))\nwhile True: pass"
    async with LocalSandbox("none", SandboxLimits(wall_seconds=60, cpu_seconds=0.5), workers=1) as sandbox:
        result = await sandbox.run(ignoring)
    assert (result.outcome, result.seconds < 50, result.stdout) == ("timed out", True, "on\n"), result


async def test_a_cancelled_program_ends_with_all_that_it_started_and_the_worker_goes_on(mode: Mode) -> None:
    async with LocalSandbox(mode, LIMITS, workers=1) as sandbox:
        idle = below(os.getpid())
        running = asyncio.create_task(sandbox.run(DAEMON))
        await _have_been_started(len(idle) + 2)
        started = below(os.getpid()) - idle
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert all_gone(started, 0)
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert below(os.getpid()) == idle, "the same worker"
        # Cancelled at any moment, before the worker has it all or after.
        for moment in range(6):
            running = asyncio.create_task(sandbox.run("import time; time.sleep(100)", "x" * 2**20))
            await asyncio.sleep(0.002 * moment)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert (await sandbox.run("print(2)")).stdout == "2\n"


async def test_nothing_is_left_when_it_closes(mode: Mode, folder: Path) -> None:
    before = below(os.getpid())
    async with LocalSandbox(mode, LIMITS) as sandbox:
        running = asyncio.create_task(sandbox.run(DAEMON))
        await sandbox.run("open('left', 'w').write('left')")
        await _have_been_started(len(before) + 4)
        started = below(os.getpid()) - before
        assert list(folder.iterdir())
    assert all_gone(started, 0)
    assert list(folder.iterdir()) == []
    with pytest.raises(WorldError):
        await running
    with pytest.raises(RuntimeError, match="async with"):
        await sandbox.run("print(1)")


async def test_a_worker_that_dies_is_no_result_and_the_next_call_gets_another(mode: Mode) -> None:
    others = below(os.getpid())  # that earlier tests of this process have started
    async with LocalSandbox(mode, LIMITS, workers=1) as sandbox:
        for moment in ("idle", "running"):
            running = asyncio.create_task(sandbox.run(DAEMON))
            before = below(os.getpid())
            if moment == "running":
                # With what it has left behind, which only the keeper's end ends.
                await _have_been_started(len(before) + 2)
            started = below(os.getpid()) - others
            (first,) = set(psutil.Process().children()) - others
            keeper = first if not first.children() else (first.children()[0] if mode != "none" else first)
            keeper.send_signal(signal.SIGKILL)
            with pytest.raises(WorldError, match="worker failed"):
                await running
            if mode == "none":
                # What it had left behind outlives it there.
                for process in started:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            assert all_gone(started)
            assert (await sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("started", [True, False], ids=["while it runs", "while it starts"])
def test_all_ends_with_a_driver_that_is_killed(mode: Mode, folder: Path, started: bool) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys, tempfile
        from rljob_trainer.world.sandbox import LocalSandbox

        async def main():
            tempfile.tempdir = {str(folder)!r}
            async with LocalSandbox({mode!r}, workers=2) as sandbox:
                print("open", flush=True)
                sys.stdin.readline()
                await sandbox.run({DAEMON!r})

        asyncio.run(main())
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "open\n"
        assert driver.stdin is not None
        ready = len(below(driver.pid))
        driver.stdin.write("go on\n")
        driver.stdin.flush()
        if started:
            while len(below(driver.pid)) < ready + 2:  # the program, and what it leaves
                assert driver.poll() is None
        processes = below(driver.pid)
        driver.kill()
    assert all_gone(processes)
    # The folder stays, and goes with the next sandbox that starts.
    assert list(abandoned()) == [entry for entry in folder.iterdir() if entry.name.startswith(PREFIX)] != []


async def test_the_next_sandbox_deletes_what_a_killed_one_left_and_no_other(folder: Path) -> None:
    left = folder / f"{PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    half_deleted, beginning = folder / f"{PREFIX}half", folder / f"{PREFIX}new"
    half_deleted.mkdir()
    os.utime(half_deleted, (0, 0))
    beginning.mkdir()
    async with LocalSandbox("none", workers=1):
        assert not left.exists()
        assert not half_deleted.exists()
        beginning.rmdir()
        (own,) = folder.iterdir()
        async with LocalSandbox("none", workers=1):
            assert own.exists()


async def test_programs_get_no_variable_but_what_python_needs(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret")
    async with LocalSandbox(mode, LIMITS, workers=1) as sandbox:
        names = (await sandbox.run("import os; print(*sorted(os.environ))")).stdout.split()
    allowed = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD", "PYTHONHASHSEED", "TMPDIR"}
    assert set(names) <= allowed


def test_a_folder_that_somebody_else_sweeps_at_the_same_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}x").mkdir()
    listed = Path.glob

    def swept_meanwhile(folder: Path, pattern: str) -> list[Path]:
        found = list(listed(folder, pattern))
        for each in found:
            each.rmdir()
        return found

    monkeypatch.setattr(Path, "glob", swept_meanwhile)
    assert list(abandoned()) == []


async def test_hashes_are_the_same_in_every_worker(mode: Mode) -> None:
    source = "import os; print(os.getppid(), hash('a'), list({'a', 'b', 'c', 'd'}))"
    found = []
    for _ in range(2):
        async with LocalSandbox(mode, LIMITS, workers=1) as sandbox:
            found.append((await sandbox.run(source)).stdout.split(maxsplit=1)[1])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "", "a\0b"])
async def test_files_stay_in_the_folder(name: str) -> None:
    async with LocalSandbox("none", workers=1) as sandbox:
        with pytest.raises(ValueError, match="not a path below"):
            await sandbox.run("", files={name: ""})


async def test_what_is_too_much_for_the_sandbox_is_said_before_it_is_sent() -> None:
    async with LocalSandbox("none", SandboxLimits(file_bytes=2**20), workers=1) as sandbox:
        with pytest.raises(ValueError, match="exceed the sandbox's limits"):
            await sandbox.run("", stdin="é" * (2**18 + 1))
        with pytest.raises(ValueError, match="exceed the sandbox's limits"):
            await sandbox.run("", files={str(number): "" for number in range(513)})
        assert (await sandbox.run("print(len(input()))", "é" * (2**18 - 10))).stdout == f"{2**18 - 10}\n"


WRITTEN = {
    "surrogate": "print('\ud800')",
    "zero": "print(1)\0",
    "brackets": "(" * 10000,
    "signs": "x = " + "-" * 100000 + "1",
    "form feed": "\x0c\udfff",
}


@pytest.mark.parametrize("name", WRITTEN)
async def test_whatever_a_model_writes_is_a_program(name: str) -> None:
    async with LocalSandbox("none", workers=1) as sandbox:
        result = await sandbox.run(WRITTEN[name], "\ud800\n", {"a": "\udfff"})
        assert (result.outcome, result.exit_code) in (("exited", 1), ("out of memory", 1), ("killed", -11)), result


async def test_texts_that_are_no_unicode_are_bytes_all_the_same() -> None:
    """Escaped bytes are those; other surrogates are encoded as UTF-8 would encode a character of that number."""
    source = "import sys; print([*sys.stdin.buffer.read()], [*open('a', 'rb').read()])"
    async with LocalSandbox("none", workers=1) as sandbox:
        result = await sandbox.run(source, "\ud800", {"a": "\udcff"})
    assert result.stdout == "[237, 160, 128] [255]\n"


async def test_a_program_that_could_not_be_started_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalSandbox("none", workers=1) as sandbox:
        # Two paths of which one would have to be both a file and a folder.
        with pytest.raises(WorldError, match=r"could not start a program(.|\n)*NotADirectory|FileExists"):
            await sandbox.run("print(1)", files={"a": "", "a/b": ""})
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_before_signals_are_held_back_programs_start_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux 6.2 to 6.11: the rule set leaves out what the kernel here knows beyond those."""
    skip_unless_available("landlock")
    monkeypatch.setattr(landlock, "abi", lambda: 3)
    async with LocalSandbox("landlock", LIMITS, workers=1) as sandbox:
        assert any("not start processes" in text for text in sandbox.not_contained)
        tried = f"""
            import os, signal, threading
            for attempt in (lambda: os.fork(), lambda: os.kill({os.getpid()}, 0), lambda: os.kill(os.getppid(), 0),
                            lambda: os.posix_spawn("/bin/true", ["true"], {{}})):
                try:
                    print("through", attempt())
                except OSError as error:
                    print(type(error).__name__)
            thread = threading.Thread(target=print, args=("thread",))
            thread.start()
            thread.join()
            signal.signal(signal.SIGUSR1, lambda *_: print("own signal"))
            os.kill(os.getpid(), signal.SIGUSR1)
        """
        result = await sandbox.run(textwrap.dedent(tried))
    assert result.stdout.split("\n") == [*["PermissionError"] * 4, "thread", "own signal", ""], result


def test_modes_that_do_not_work_here_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_trainer.world.sandbox import mode_available

    monkeypatch.setattr(landlock, "abi", lambda: 0)
    assert "no Landlock" in (mode_available("landlock") or "")
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    assert "version 2" in (mode_available("landlock") or "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "bwrap" in (mode_available("namespaces") or "")
    assert mode_available("none") is None


@pytest.mark.parametrize(
    "wrong", [{"wall_seconds": 0}, {"cpu_seconds": -1}, {"memory_bytes": 1}, {"processes": 0}, {"file_bytes": 0}]
)
def test_limits_that_no_program_can_keep_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        SandboxLimits(**wrong)

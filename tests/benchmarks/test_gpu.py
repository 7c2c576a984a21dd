"""The check for GPUs where there is none: what it says of what is missing, and what becomes of parts that hang or
fail. ``tests/runs/test_gpu_parts.py`` runs the parts that a CPU can try."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    accept,
    ending,
    engine,
    learner,
    memory,
    outcomes,
    own_process,
    part,
    parts,
    processes,
    publication,
    step,
)
from benchmarks.gpu.baseline import CHECK_NAME, KeptBaseline
from benchmarks.gpu.figures import Figure, Writer, read, read_notes
from benchmarks.gpu.step import JOB, SEPARATE
from benchmarks.gpu.wheels import beside_torch, own
from benchmarks.machine import Hardware

from rljob_api import load_jobs, resolve
from rljob_api.memory import known_shape, untold
from rljob_api.memory.inputs import MemoryInputs
from rljob_trainer.driver.gpus import gpus_wanted


def figures(outcome: outcomes.PartOutcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


FAKE = "#!/bin/sh\n"
HOPPER = (9, 0)
"""An H100's compute capability."""


def python_that(folder: Path, script: str) -> str:
    """Stands in for the interpreter; $5 is the file to write to."""
    path = folder / "python"
    path.write_text(FAKE + script)
    path.chmod(0o755)
    return str(path)


LINE = json.dumps({"name": "speed", "value": 2.0, "unit": "GB/s", "goal": "", "met": None})


def test_a_part_that_hangs_is_killed_with_what_it_has_started_and_keeps_its_figures(tmp_path: Path) -> None:
    started = tmp_path / "started"
    hangs = f"echo '{LINE}' > \"$5\"; echo going; sleep 600 & echo $! > {started}; wait"
    outcome = command.run("engine", 1.0, "cuda", tmp_path, python_that(tmp_path, hangs))
    assert outcome.state == "killed"
    assert figures(outcome) == {"speed": 2.0}
    assert outcome.reason == "did not end within 1 s; it printed last:\ngoing"
    process = int(started.read_text())
    give_up = time.monotonic() + 30  # a busy machine takes its time to end what was killed
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_part_that_fails_is_named_with_what_it_printed(tmp_path: Path) -> None:
    outcome = command.run("engine", 60.0, "cuda", tmp_path, python_that(tmp_path, "echo no memory >&2; exit 3"))
    assert (outcome.state, outcome.reason) == ("failed", "exit code 3:\nno memory")
    assert not outcome.is_fine
    assert "- engine: failed: exit code 3" in outcomes.show({"engine": outcome})


def test_a_line_that_was_begun_when_its_part_was_killed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    Writer(path).at_most("error", 0.5, 0.1)
    path.write_text(path.read_text() + LINE[:20])
    (figure,) = read(path)
    assert (figure.value, figure.goal, figure.met) == (0.5, "<= 0.1", False)


def test_on_one_gpu_what_needs_two_is_listed_as_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    lacks = {part.name: parts.lacking(part, "cuda", 1, tmp_path, HOPPER) for part in parts.PARTS}
    two = "needs 2 GPUs, and this machine has 1"
    assert {name: lack for name, lack in lacks.items() if lack is not None} == {
        "publication-nccl": two,
        "killed-nccl": two,
        "step-separate": two,
        "step-separate-deterministic": two,
        "step-trl": "TRL with vLLM is not installed: `python3 -m benchmarks.gpu.peer` makes its environment",
    }


def test_on_a_card_without_what_batch_invariance_needs_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    lacks = {part.name: parts.lacking(part, "cuda", 2, tmp_path, (7, 5)) for part in parts.PARTS}
    assert {name for name, lack in lacks.items() if lack == "needs compute capability 8.0, this card has 7.5"} == {
        "step-deterministic",
        "step-separate-deterministic",
    }
    newer = [parts.lacking(part, "cuda", 2, tmp_path, (12, 0)) for part in parts.PARTS]
    assert not any("capability" in lack for lack in newer if lack is not None)


@pytest.mark.parametrize(("printed", "capability"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("", (0, 0))])
def test_torch_is_asked_for_the_card_s_compute_capability(
    tmp_path: Path, printed: str, capability: tuple[int, int]
) -> None:
    assert parts.capability_of(python_that(tmp_path, f"echo {printed}")) == capability


def test_packages_that_are_missing_are_named_and_what_wants_torch_alone_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name in ("ray", "vllm") else object())
    alone = [part.name for part in parts.PARTS if parts.lacking(part, "cuda", 1, tmp_path, HOPPER) is None]
    assert alone == [
        *("attention", "learner", "publication", "publication-ipc", "killed", "compile"),
        *("memory", "profile", "deterministic"),
    ]
    lack = parts.lacking(parts.BY_NAME["step-colocated"], "cuda", 1, tmp_path, HOPPER)
    assert lack is not None
    assert "no vllm and no ray: `make install ACCELERATOR=gpu`" in lack


def said_by(arguments: list[str]) -> str:
    """What the command ends with when it refuses to begin."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert isinstance(ended.value.code, str)  # which the interpreter prints, with exit code 1
    return ended.value.code


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command takes signals for itself."""
    before = {each: signal.getsignal(each) for each in command.ENDED_BY}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


CPU_BUILD = "this Python's torch is a CPU build: `make install ACCELERATOR=gpu`"
NO_DRIVER = "torch (CUDA 13.0) sees no GPU: `nvidia-smi` has to list it, with driver 580 or newer;"


@pytest.mark.parametrize(
    ("there", "cuda", "why"),
    [(object(), "13.0", NO_DRIVER), (object(), None, CPU_BUILD), (None, None, "this Python has no torch")],
)
def test_without_a_gpu_that_is_said_once_and_earlier_results_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: object,
    cuda: str | None,
    why: str,
) -> None:
    monkeypatch.setattr(command, "gpu_count", lambda python: 0)
    monkeypatch.setattr(parts, "cuda_of_torch", lambda python: cuda)
    monkeypatch.setattr(parts, "find_spec", lambda name: there)
    (tmp_path / "gpu.json").write_text("earlier")
    assert said_by(["--results", str(tmp_path), "--cache", str(tmp_path / "cache")]).startswith(why)
    assert capsys.readouterr().out == ""
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("gpu.json", "earlier")]


@pytest.mark.parametrize(("printed", "version"), [("13.0", "13.0"), ("", None)])
def test_torch_is_asked_what_it_is_built_for(tmp_path: Path, printed: str, version: str | None) -> None:
    python = python_that(tmp_path, f'[ "$2" = "import torch; print(torch.version.cuda or \'\')" ] && echo "{printed}"')
    assert parts.cuda_of_torch(python) == version


def test_results_that_cannot_be_written_are_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpu_count", lambda python: 1)
    monkeypatch.setattr(command, "capability_of", lambda python: HOPPER)
    (tmp_path / "file").write_text("")
    said = said_by(["--only", "attention", "--results", str(tmp_path / "file" / "sub"), "--cache", str(tmp_path)])
    assert f"{tmp_path}/file/sub" in said
    assert "choose another --results" in said
    assert capsys.readouterr().out == ""


def test_a_part_for_which_all_time_is_too_little_says_how_much_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    clock = [100.0]
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def run(*asked: object) -> outcomes.PartOutcome:
        clock[0] += 5
        return outcomes.PartOutcome("measured")

    monkeypatch.setattr(command, "run", run)
    found = command.check(["learner"], "cpu", tmp_path, tmp_path, 1.0)
    assert found["learner"].reason == "10 s are too little for it, which may take 1500 s: `--seconds 150`"
    # A second part for which nothing is left has had enough in the beginning.
    monkeypatch.setattr(command, "gpu_count", lambda python: 1)
    monkeypatch.setattr(command, "capability_of", lambda python: HOPPER)
    found = command.check(["publication-ipc", "killed"], "cuda", tmp_path, tmp_path, 22.0)
    assert found["publication-ipc"].state == "measured"
    assert found["killed"].reason == "no time was left of 22 s: `--only killed`"


@pytest.mark.parametrize("said", ["nan", "0", "-5", "inf", "a while"])
def test_a_time_in_which_nothing_can_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([f"--seconds={said}", "--device=cpu", "--results", str(tmp_path / "results")])
    assert ended.value.code == 2
    assert f"--seconds: '{said}' is no number of seconds above 0: 480, say" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.slow(stands_for="[on a CPU]")
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "1 s at most for all parts together\n"),
        ("cpu", "10 s at most for all parts together (10 times what --seconds says, since this is a CPU)\n"),
    ],
    ids=["on a GPU", "on a CPU"],
)
def test_a_check_that_measures_nothing_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str, said: str
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "gpu_count", lambda python: 1)
    monkeypatch.setattr(command, "capability_of", lambda python: HOPPER)
    found = said_by(["--seconds=1", "--device", device, "--results", str(tmp_path), "--cache", str(tmp_path / "cache")])
    assert found == "no part was measured, for the reasons above"
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert "- attention: not measured: " in printed


def test_the_help_says_that_a_cpu_has_more_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "(default: 480); --device cpu has 10 times as many" in " ".join(capsys.readouterr().out.split())


CHECK = """
import functools, signal, sys
from benchmarks.gpu import __main__ as command
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
command.run = functools.partial(command.run, python=sys.argv[1])
command.gpu_count = lambda python: 1
command.capability_of = lambda python: (9, 0)
command.main(["--only", "attention", "learner", "--results", sys.argv[2], "--cache", sys.argv[2]])
"""
"""The command with two parts that are stood in for."""


@contextmanager
def running_check(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command while its first part hangs, with one figure written; the part's process and one that it started."""
    started = folder / "started"
    python = python_that(folder, f"echo '{LINE}' > \"$5\"; sleep 600 & echo $$ $! > {started}.begun\n"
                                 f"mv {started}.begun {started}; wait")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": command.IMPORTABLE}
    arguments = [sys.executable, "-c", CHECK, python, str(folder / "results")]
    process = subprocess.Popen(arguments, cwd=command.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        give_up = time.monotonic() + 60
        # The part and what guards it.
        while not started.exists() or len(psutil.Process(process.pid).children()) < 2:
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield process, [psutil.Process(int(number)) for number in started.read_text().split()]
    finally:
        process.kill()
        process.wait()


HOLDS_A_SEMAPHORE = """
import multiprocessing, signal, sys, time
if __name__ == "__main__":
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    held = context.Lock()
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    from pathlib import Path
    Path(sys.argv[1]).with_suffix(".begun").write_text(f"{held._semlock.name} {child.pid}")
    Path(sys.argv[1]).with_suffix(".begun").rename(sys.argv[1])
    time.sleep(600)
"""
"""What a process pool of a part has: a semaphore by name, and a process that was started anew."""


def semaphore_of(told: Path, process: subprocess.Popen[bytes]) -> tuple[Path, psutil.Process]:
    """Once the program is so far: the file of its semaphore, and the process that it has started."""
    give_up = time.monotonic() + 60
    while not told.exists():
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.01)
    name, child = told.read_text().split()
    semaphore = Path(f"/dev/shm/sem.{name.removeprefix('/')}")
    assert semaphore.exists()
    return semaphore, psutil.Process(int(child))


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_no_semaphore_stays_of_a_part_that_is_ended(tmp_path: Path, manner: str) -> None:
    program, told = tmp_path / "part.py", tmp_path / "told"
    program.write_text(HOLDS_A_SEMAPHORE)
    with subprocess.Popen([sys.executable, program, told, manner], start_new_session=True) as process:
        semaphore, child = semaphore_of(told, process)
        ending.end(process, 0.2)
    assert not semaphore.exists()
    wait_for_the_end_of([child])


def test_no_semaphore_stays_of_a_part_whose_check_is_killed(tmp_path: Path) -> None:
    program, told = tmp_path / "part.py", tmp_path / "told"
    program.write_text(HOLDS_A_SEMAPHORE)
    check = (
        "import subprocess, sys; from benchmarks.gpu.ending import guarded\n"
        "with guarded(process := subprocess.Popen(sys.argv[1:], start_new_session=True)): process.wait()"
    )
    command_line = [sys.executable, "-c", check, sys.executable, program, told, "polite"]
    with subprocess.Popen(command_line, env={**os.environ, "PYTHONPATH": command.IMPORTABLE}) as process:
        semaphore, child = semaphore_of(told, process)
        process.kill()
    wait_for_the_end_of([child])
    give_up = time.monotonic() + 30
    while semaphore.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    give_up = time.monotonic() + 30
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_part_and_what_it_had_measured_is_kept_and_printed(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running_check(tmp_path) as (process, part):
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
        wait_for_the_end_of(part)
    assert process.returncode == 130
    assert "| speed | attention | 2 GB/s |" in printed
    assert "- attention: interrupted: a signal ended it after" in printed
    assert "learner:" not in printed
    results = json.loads((tmp_path / "results" / "gpu.json").read_text())["results"]
    assert {name: entry["outcome"]["state"] for name, entry in results.items()} == {"attention": "interrupted"}


def test_no_part_outlives_a_check_that_was_killed(tmp_path: Path) -> None:
    with running_check(tmp_path) as (process, part):
        process.kill()
        process.wait()
        wait_for_the_end_of(part)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "expandable_segments:True"), ("cpu", None)])
def test_what_a_rank_does_is_measured_with_a_ranks_environment_and_engines_beside_it_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, expected: str | None
) -> None:
    """As ``learner_options`` gives it to the ranks of a job: the allocator's setting is its, too."""
    seen: dict[str, tuple[str | None, str | None]] = {}

    def note(name: str) -> None:
        here = os.environ.get("PYTORCH_ALLOC_CONF")
        with processes.as_engine():
            seen[name] = here, os.environ.get("PYTORCH_ALLOC_CONF")
        assert os.environ.get("PYTORCH_ALLOC_CONF") == here

    monkeypatch.setattr(learner, "measure", lambda *asked: note("learner"))
    monkeypatch.setattr(publication, "measure", lambda *asked: note("publication-ipc"))
    monkeypatch.setattr(engine, "measure", lambda *asked: note("engine"))
    monkeypatch.setattr(own_process, "measure", lambda *asked: note("engine-process-weights"))
    for name in ("learner", "publication-ipc", "engine", "engine-process-weights"):
        with monkeypatch.context() as own:
            before = dict(os.environ)
            own.setattr(sys, "argv", ["part", name, "--write", str(tmp_path / "figures"), "--device", device])
            part.main()
            for added in os.environ.keys() - before.keys():
                del os.environ[added]
    rank, other = (expected, None), (None, None)
    assert seen == {"learner": rank, "publication-ipc": rank, "engine": other, "engine-process-weights": rank}


def test_on_one_gpu_every_part_has_its_time(tmp_path: Path) -> None:
    """Those that repeat what another one does come last: by name, or where the others were quick."""
    alone = [part for part in parts.PARTS if part.gpus == 1]
    first = [part.name for part in alone].index("compile")
    last = ["memory", "profile", "deterministic", "engine-process", "engine-process-weights", "step-deterministic"]
    assert [part.name for part in alone[first:]] == ["compile", *last, "step-trl"]
    # A part is begun with half of what it may take; on a machine that has them all compiled, that is enough.
    assert sum(part.seconds / 2 for part in alone[:first]) <= command.SECONDS


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        (JOB, {}),
        (JOB, SEPARATE),
        (JOB, {**SEPARATE, "deterministic": True}),
        (accept.EXAMPLE, accept.PPO),
        (JOB, accept.GRPO),
    ],
    ids=["colocated", "separate", "separate, deterministic", "accept's PPO", "accept's GRPO"],
)
def test_the_jobs_that_are_run_are_valid(job: Path, settings: dict[str, object]) -> None:
    assert load_jobs(job, [f"{path}={value}" for path, value in settings.items()])


def fetched(requirements: str) -> set[str]:
    """The packages, each of which has a hash."""
    pinned = [entry for entry in requirements.replace("\\\n", "").splitlines() if "==" in entry]
    assert all("--hash=sha256:" in entry for entry in pinned)
    return {entry.partition("==")[0].strip() for entry in pinned}


def test_the_pages_name_the_driver_and_the_compiler_that_a_machine_with_gpus_needs() -> None:
    for page in ("README.md", "benchmarks/gpu/README.md"):
        text = (command.ROOT / page).read_text()
        assert re.search(rf"driver,? {parts.DRIVER} or newer", text), page
        assert re.search(r"gcc\W+and Python's headers", text), page
    assert f"driver has to be {parts.DRIVER} or newer" in (command.ROOT / "docs" / "real-cluster.md").read_text()


def test_a_job_of_one_s_own_is_put_on_a_gpu_as_the_readme_says() -> None:
    (engine_field, trainer_field) = re.findall(
        r"there set `([a-zA-Z.]+: \w+)` and\s`([a-zA-Z.]+: \d)` as well", (command.ROOT / "README.md").read_text()
    )[0]
    settings = [field.replace(": ", "=") for field in (engine_field, trainer_field)]
    [job] = load_jobs(command.ROOT / "examples" / "own-data.yaml", settings)
    assert gpus_wanted(resolve(job).spec) == {"spec.trainer": 1}


def test_every_wheel_of_ours_that_is_fetched_has_a_hash() -> None:
    names = fetched(own())
    # What trains, what installs, and what makes the project's own wheel.
    assert {"torch", "vllm", "ray", "transformers", "uv", "hatchling", "editables"} <= names


def test_what_the_parts_that_want_torch_alone_need_beside_it_is_small() -> None:
    names = fetched(beside_torch())
    assert {*parts.LEARNER} - {"torch"} <= names
    assert {"transformers", "tokenizers", "safetensors", "numpy", "pydantic"} <= names
    # 44 MiB as wheels, of which transformers and numpy are 28.
    assert not {"torch", "triton", "vllm", "ray", "scipy", "pyarrow"} & names
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


MACHINE = Hardware(
    processor="a processor", cores=8, memory_gigabytes=64.0, system="Linux", python="3.12", versions={}, load=0.0,
    commit="abc", accelerator="NVIDIA H100, 81559 MiB",
)  # fmt: skip


def measured(value: float) -> outcomes.PartOutcome:
    return outcomes.PartOutcome("measured", 3.0, [Figure("speed", value, "GB/s")])


def kept(path: Path) -> dict[str, tuple[str, str, float]]:
    """State, commit and first figure of each part in a file of results."""
    results = json.loads(path.read_text())["results"]
    return {
        part: (entry["outcome"]["state"], entry["commit"], entry["outcome"]["figures"][0]["value"])
        for part, entry in results.items()
    }


def test_results_of_other_parts_stay_with_the_commit_that_they_were_measured_at(tmp_path: Path) -> None:
    first = outcomes.ResultsFile(tmp_path, "cuda", MACHINE)
    first.keep({"attention": measured(1.0), "learner": measured(2.0)})
    later = outcomes.ResultsFile(tmp_path, "cuda", replace(MACHINE, commit="def"))
    later.keep({"learner": measured(3.0), "killed": measured(4.0)})
    assert later.path == tmp_path / "gpu.json"
    assert kept(later.path) == {
        "attention": ("measured", "abc", 1.0),
        "learner": ("measured", "def", 3.0),
        "killed": ("measured", "def", 4.0),
    }
    page = (tmp_path / "gpu.md").read_text()
    assert "| speed | attention | 1 GB/s |" in page
    assert re.search(r"^- attention: measured at 20\d\d-\d\d-\d\d .* commit abc, in 3 s$", page, re.MULTILINE)


def test_what_was_not_run_to_its_end_takes_no_figures_away(tmp_path: Path) -> None:
    results = outcomes.ResultsFile(tmp_path, "cuda", MACHINE)
    results.keep({"learner": measured(2.0), "killed": measured(4.0), "engine": measured(5.0)})
    half = [Figure("speed", 9.0)]
    results.keep({"learner": outcomes.PartOutcome("interrupted", 1.0, half, "by a signal")})
    results.keep({"killed": outcomes.PartOutcome("not measured", reason="no time was left")})
    results.keep({"engine": outcomes.PartOutcome("failed", 1.0, half, "exit code 1")})
    assert kept(results.path) == {
        "learner": ("measured", "abc", 2.0), "killed": ("measured", "abc", 4.0), "engine": ("failed", "abc", 9.0)
    }  # fmt: skip


@pytest.mark.parametrize("earlier", [None, "{not JSON", "[]", '{"results": {"engine": 1}}'], ids=str)
def test_results_of_another_card_are_left_alone(tmp_path: Path, earlier: str | None) -> None:
    if earlier is None:
        outcomes.ResultsFile(tmp_path, "cuda", MACHINE).keep({"engine": measured(5.0)})
        earlier = (tmp_path / "gpu.json").read_text()
    else:
        (tmp_path / "gpu.json").write_text(earlier)
    other = replace(MACHINE, accelerator="NVIDIA L4, 23034 MiB")
    outcomes.ResultsFile(tmp_path, "cuda", other).keep({"engine": measured(1.0)})
    outcomes.ResultsFile(tmp_path, "cuda", other).keep({"learner": measured(2.0)})
    assert (tmp_path / "gpu.json").read_text() == earlier
    assert list(kept(tmp_path / "gpu-nvidia-l4-23034-mib.json")) == ["engine", "learner"]


def test_each_part_has_the_versions_that_it_was_measured_with(tmp_path: Path) -> None:
    older = replace(MACHINE, versions={"torch": "2.11.0", "driver": "580.159"})
    outcomes.ResultsFile(tmp_path, "cuda", older).keep({"attention": measured(1.0), "killed": measured(1.0)})
    newer = replace(MACHINE, versions={"torch": "2.13.0", "vllm": "0.32.0", "driver": "580.159"})
    results = outcomes.ResultsFile(tmp_path, "cuda", newer)
    results.keep({"killed": measured(2.0), "engine": measured(3.0)})
    found = json.loads(results.path.read_text())["results"]
    assert {part: entry["versions"] for part, entry in found.items()} == {
        "attention": {"Python": "3.12", "torch": "2.11.0", "driver": "580.159"},
        "killed": {"Python": "3.12", "torch": "2.13.0", "vllm": "0.32.0", "driver": "580.159"},
        "engine": {"Python": "3.12", "torch": "2.13.0", "vllm": "0.32.0", "driver": "580.159"},
    }
    lines = [
        line.partition(" in 3 s")[2] for line in (tmp_path / "gpu.md").read_text().splitlines() if " in 3 s" in line
    ]
    assert lines == [", with torch 2.11.0 (vllm: none, or not on record)", "", ""]


def test_results_from_before_versions_were_kept_stay_without_any(tmp_path: Path) -> None:
    outcomes.ResultsFile(tmp_path, "cuda", MACHINE).keep({"attention": measured(1.0)})
    whole = json.loads((tmp_path / "gpu.json").read_text())
    del whole["results"]["attention"]["versions"]
    (tmp_path / "gpu.json").write_text(json.dumps(whole))
    outcomes.ResultsFile(tmp_path, "cuda", MACHINE).keep({"killed": measured(2.0)})
    assert list(kept(tmp_path / "gpu.json")) == ["attention", "killed"]
    assert "in 3 s (Python: none, or not on record)" in (tmp_path / "gpu.md").read_text()


def test_the_committed_results_name_the_versions_of_each_part() -> None:
    folder = command.HERE / "results"
    results = json.loads((folder / "gpu.json").read_text())["results"]
    for name, entry in results.items():
        assert {"torch", "driver"} <= entry["versions"].keys(), name
        if "vllm" in parts.BY_NAME[name].packages:
            assert entry["versions"]["vllm"] == "0.32.0"
    assert re.search(r"^- attention: .*, with torch 2\.11 ", (folder / "gpu.md").read_text(), re.MULTILINE)


class FakeWorkshop:
    """A machine whose GPU and commit change."""

    def __init__(self) -> None:
        self.machine = MACHINE

    def look(self) -> Hardware:
        return self.machine


def test_a_ratio_divides_by_a_number_of_the_same_card_and_commit_alone(tmp_path: Path) -> None:
    workshop = FakeWorkshop()
    kept_by = KeptBaseline("step-colocated", workshop.look)
    remedy = "run step-colocated first, or both together"
    assert kept_by.read(tmp_path) == f"no ratio, since there is no figure of step-colocated yet: {remedy}"
    kept_by.keep(tmp_path, 2.5)
    assert kept_by.read(tmp_path) == 2.5
    where = "no ratio, since step-colocated was measured on NVIDIA H100, 81559 MiB at commit abc"
    for other in (replace(MACHINE, commit="def"), replace(MACHINE, accelerator="NVIDIA L4, 23034 MiB")):
        workshop.machine = other
        assert kept_by.read(tmp_path) == f"{where}: {remedy}"


@pytest.mark.parametrize("commit", ["c070a5e-dirty", "unknown"])
def test_a_number_of_code_that_is_not_committed_counts_in_its_own_check_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    kept_by = KeptBaseline("engine", lambda: replace(MACHINE, commit=commit))
    refused = f"no ratio, since engine was measured earlier and what code that was is not known (commit {commit}): "
    monkeypatch.delenv(CHECK_NAME, raising=False)
    kept_by.keep(tmp_path, 2.5)
    assert kept_by.read(tmp_path) == f"{refused}run both together"
    monkeypatch.setenv(CHECK_NAME, "first")
    kept_by.keep(tmp_path, 2.5)
    assert kept_by.read(tmp_path) == 2.5
    monkeypatch.setenv(CHECK_NAME, "second")
    assert kept_by.read(tmp_path) == f"{refused}run both together"


def test_parts_of_a_check_know_that_they_belong_together(tmp_path: Path) -> None:
    said = [
        command.run("engine", 60.0, "cuda", tmp_path, python_that(tmp_path, f"echo ${CHECK_NAME}; exit 1")).reason
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert re.fullmatch(r"exit code 1:\n[0-9a-f]{32}", said[0])


@pytest.mark.parametrize(("before", "ratio"), [(None, None), (5.0, 2.0)])
def test_steps_without_a_number_to_divide_by_say_which_part_to_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float | None, ratio: float | None
) -> None:
    monkeypatch.setattr(step, "measure_ours", lambda *asked: 10.0)
    monkeypatch.setattr(step, "OURS", KeptBaseline("step-colocated", lambda: MACHINE))
    if before is not None:
        step.OURS.keep(tmp_path, before)
    written = tmp_path / "figures"
    step.deterministic(Writer(written), tmp_path)
    assert [figure.value for figure in read(written)] == ([] if ratio is None else [ratio])
    assert ["run step-colocated first" in note for note in read_notes(written)] == ([True] if ratio is None else [])


def test_what_a_part_notes_is_below_the_table(tmp_path: Path) -> None:
    note = json.dumps({"note": "no ratio: run engine first"})
    python = python_that(tmp_path, f"echo '{LINE}' > \"$5\"; echo '{note}' >> \"$5\"")
    outcome = command.run("engine-process", 60.0, "cuda", tmp_path, python)
    assert (outcome.state, figures(outcome)) == ("measured", {"speed": 2.0})
    assert "- engine-process: measured: no ratio: run engine first" in outcomes.show({"engine-process": outcome})


def test_a_run_that_hangs_has_printed_where_it_is_and_keeps_its_folder(tmp_path: Path) -> None:
    rljob, run = tmp_path / "rljob", tmp_path / "gpu-runs" / "run"
    rljob.write_text(f'{FAKE}mkdir -p "$4" && echo row > "$4/metrics.jsonl"; echo "$@"; echo step 1 of 4; sleep 60\n')
    rljob.chmod(0o755)
    program = (
        "from pathlib import Path; from benchmarks.gpu import step; "
        f"step.RLJOB = Path('{rljob}'); step.train(Path('{run}'), {{'placement': 'separate'}})"
    )
    environment = {**os.environ, "PYTHONPATH": command.IMPORTABLE}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline().rstrip() for _ in range(3)]
        still_runs = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    asked = f"run {JOB} --output {run} --resume never --steps=4 --set=placement=separate"
    assert printed == [f"the run is in {run}", asked, "step 1 of 4"]
    assert still_runs
    assert (run / "metrics.jsonl").read_text() == "row\n"


def model_in(folder: Path) -> None:
    """A folder with the files that a model has."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


ACCEPT = """
import functools, signal, sys
from pathlib import Path
from benchmarks import machine
from benchmarks.gpu import accept
machine._commit = lambda: "c070a5e"
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
accept.RLJOB = Path(sys.argv[1])
accept.gpu_count = lambda python: 1
accept.main(sys.argv[2:])
"""
RUN = """#!/bin/sh
# Stands in for rljob: run JOB --output DIR --resume auto ...
mkdir -p "$4"; echo "$$ $(basename $4) with $5 $6 $7"
case $4 in
*/grpo-*) row='{"step": %d, "throughput/tokens_per_second": %d}'; printf "$row\\n" 1 5 2 5 3 70 > $4/metrics.jsonl ;;
*/ppo-*)
    if [ ! -e $4/checkpoint ]; then
        sleep 600 & trap 'echo saved; touch $4/checkpoint; exit 143' TERM; echo step 1; wait
    fi
    echo "goes on"; echo '{"step": 9, "validation/gsm8k-test/mean@1": 0.571}' > $4/metrics.jsonl ;;
esac
echo '{}' > $4/summary.json
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_what_is_accepted_is_shown_as_it_goes_kept_when_it_is_interrupted_and_gone_on_with(
    tmp_path: Path, number: signal.Signals
) -> None:
    rljob, models, runs = tmp_path / "rljob", tmp_path / "models", tmp_path / "runs"
    rljob.write_text(RUN)
    rljob.chmod(0o755)
    for name in (accept.QWEN25, accept.QWEN3):
        model_in(models / name)
    asked = ["--models", models, "--runs", runs, "--results", tmp_path / "results"]
    command_line = [sys.executable, "-c", ACCEPT, *map(str, [rljob, *asked])]
    environment = {**os.environ, "PYTHONPATH": command.IMPORTABLE}

    def begin(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command_line, *more], cwd=command.ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )

    with begin() as first:
        assert first.stdout is not None
        shown = []
        while "step 1\n" not in shown:
            shown.append(first.stdout.readline())
            assert shown[-1], shown
        first.send_signal(number)
        rest = first.communicate(timeout=60)[0]
    assert first.returncode == 130
    assert rest.splitlines() == ["saved", "ppo was interrupted; the same command goes on"]
    started = next(line for line in shown if " with --resume auto" in line and " ppo-" in line)
    assert not psutil.pid_exists(int(started.split()[0]))
    (log,) = runs.glob("ppo-*.log")
    assert log.read_text() == f"{started}step 1\nsaved\n"
    assert "| GRPO at Qwen3-0.6B | 70 tokens/s |" in (tmp_path / "results" / "accept.md").read_text()

    with begin() as second:
        again = second.communicate(timeout=60)[0]
    assert second.returncode == 0
    assert "grpo has been run on this card and commit" in again
    assert "goes on\n" in again
    assert log.read_text().endswith("goes on\n")
    assert "| PPO on GSM8K, share of the test set | 0.571 | 0.567 +- 0.015 | yes |" in again
    with begin("--anew") as third:
        assert third.stdout is not None
        while (line := third.stdout.readline()) != "step 1\n":
            assert line
            assert "has been run" not in line
        third.kill()
    # Killed outright, it leaves no run that holds the GPU.
    left = int(log.read_text().splitlines()[-2].split()[0])
    wait_for_the_end_of([psutil.Process(left)] if psutil.pid_exists(left) else [])


@pytest.mark.parametrize("name", memory.CASES)
def test_a_job_whose_memory_is_measured_has_one_rank_and_a_model_that_the_plan_knows(name: str) -> None:
    case = memory.CASES[name]
    job = case.example.resolved()
    shape = known_shape(job.spec.model.source or "")
    assert shape is not None
    assert MemoryInputs.of(job, shape).ranks == 1
    assert case.layers is None or case.layers < shape.layers
    assert untold(job, shape) is None

"""The check for GPUs where there is none: what it says of what is missing, and what becomes of parts that hang or
fail. ``tests/runs/test_gpu_parts.py`` runs the parts that a CPU can try."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import accept, parts
from benchmarks.gpu.figures import Writer, read
from benchmarks.gpu.step import JOB, SEPARATE
from benchmarks.gpu.wheels import beside_torch, own

from rljob_api import load_jobs


def figures(outcome: command.PartOutcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


FAKE = "#!/bin/sh\n"


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
    assert "- engine: failed: exit code 3" in command.show({"engine": outcome})


def test_a_line_that_was_begun_when_its_part_was_killed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    Writer(path).at_most("error", 0.5, 0.1)
    path.write_text(path.read_text() + LINE[:20])
    (figure,) = read(path)
    assert (figure.value, figure.goal, figure.met) == (0.5, "<= 0.1", False)


def test_on_one_gpu_what_needs_two_is_listed_as_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: object())
    lacks = {part.name: parts.lacking(part, "cuda", 1, tmp_path) for part in parts.PARTS}
    two = "needs 2 GPUs, and this machine has 1"
    assert {name: lack for name, lack in lacks.items() if lack is not None} == {
        "publication-nccl": two,
        "killed-nccl": two,
        "step-separate": two,
        "step-trl": "TRL with vLLM is not installed: `python3 -m benchmarks.gpu.peer` makes its environment",
    }


def test_packages_that_are_missing_are_named_and_what_wants_torch_alone_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name in ("ray", "vllm") else object())
    alone = [part.name for part in parts.PARTS if parts.lacking(part, "cuda", 1, tmp_path) is None]
    assert alone == ["attention", "learner", "publication", "publication-ipc", "killed", "compile"]
    lack = parts.lacking(parts.BY_NAME["step-colocated"], "cuda", 1, tmp_path)
    assert lack is not None
    assert "no vllm and no ray: `python3.12 requirements/install.py --accelerator gpu`" in lack


def test_without_a_gpu_nothing_is_measured_and_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_count", lambda python: 0)
    outcomes = command.check(["attention", "killed"], "cuda", tmp_path, tmp_path, 480.0)
    assert {outcome.state for outcome in outcomes.values()} == {"not measured"}
    assert "attention: not measured: torch sees no GPU" in (tmp_path / "gpu.md").read_text()


def test_on_one_gpu_every_part_has_its_time(tmp_path: Path) -> None:
    """Those that repeat what another one does come last: by name, or where the others were quick."""
    alone = [part for part in parts.PARTS if part.gpus == 1]
    last = ["compile", "engine-process", "step-deterministic", "step-trl"]
    assert [part.name for part in alone[-4:]] == last
    assert sum(part.seconds for part in alone[:-4]) <= command.SECONDS


@pytest.mark.parametrize(
    ("job", "settings"),
    [(JOB, {}), (JOB, SEPARATE), (accept.EXAMPLE, accept.PPO), (JOB, accept.GRPO)],
    ids=["colocated", "separate", "accept's PPO", "accept's GRPO"],
)
def test_the_jobs_that_are_run_are_valid(job: Path, settings: dict[str, object]) -> None:
    assert load_jobs(job, [f"{path}={value}" for path, value in settings.items()])


def fetched(requirements: str) -> set[str]:
    """The packages, each of which has a hash."""
    pinned = [entry for entry in requirements.replace("\\\n", "").splitlines() if "==" in entry]
    assert all("--hash=sha256:" in entry for entry in pinned)
    return {entry.partition("==")[0].strip() for entry in pinned}


def test_every_wheel_of_ours_that_is_fetched_has_a_hash() -> None:
    names = fetched(own())
    # What trains, what installs, and what makes the project's own wheel.
    assert {"torch", "vllm", "ray", "transformers", "uv", "hatchling", "editables"} <= names


def test_what_the_parts_that_want_torch_alone_need_beside_it_is_small() -> None:
    names = fetched(beside_torch())
    assert {"transformers", "tokenizers", "safetensors", "numpy", "pydantic"} <= names
    # 44 MiB as wheels, of which transformers and numpy are 28.
    assert not {"torch", "triton", "vllm", "ray", "scipy", "pyarrow"} & names
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]

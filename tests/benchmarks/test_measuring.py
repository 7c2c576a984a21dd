"""What benchmarks compute from what they measured: rates, spreads, pairs, tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, Step, interleaved, ratios, steady, table, write_results
from benchmarks.rljob_run import read_run

from benchmarks import machine as machines

MACHINE = Hardware("processor", 2, 24.0, "Linux 6", "3.11.7", {"torch": "2.13.0"}, 0.1, "abc123")


def test_a_step_counts_generated_and_trained_tokens() -> None:
    assert Step(seconds=2.0, generated=100, trained=400).rate == 250.0


def test_a_spread_is_smallest_middle_largest_whatever_the_order() -> None:
    assert MeasuredSpread.of([3.0, 1.0, 10.0]) == MeasuredSpread(1.0, 3.0, 10.0)
    assert MeasuredSpread.of([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="at least one"):
        MeasuredSpread.of([])


def test_warm_up_is_left_out_and_must_leave_something() -> None:
    steps = [Step(float(i), 1, 1) for i in range(1, 5)]
    assert [step.seconds for step in steady(steps, 2)] == [3.0, 4.0]
    with pytest.raises(ValueError, match="4 steps"):
        steady(steps, 4)


def test_sides_take_turns_and_ratios_are_pair_by_pair() -> None:
    order: list[str] = []

    def side(name: str, scale: float):  # type: ignore[no-untyped-def]
        def run(repetition: int) -> float:
            order.append(f"{name}{repetition}")
            return scale * (repetition + 1)

        return run

    measured = interleaved({"a": side("a", 6.0), "b": side("b", 2.0)}, 3)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert ratios(measured["a"], measured["b"]) == [3.0, 3.0, 3.0]


def test_results_are_written_with_the_machine_for_programs_and_for_readers(tmp_path: Path) -> None:
    write_results(
        tmp_path, "speed", MACHINE, {"ratio": MeasuredSpread(1.0, 2.0, 3.14159265)}, table(["", "x"], [["a", "1"]])
    )
    whole = json.loads((tmp_path / "speed.json").read_text())
    assert whole["machine"]["commit"] == "abc123"
    assert whole["results"]["ratio"] == {"min": 1.0, "median": 2.0, "max": 3.1416}
    text = (tmp_path / "speed.md").read_text()
    assert text.startswith("|  | x |\n| --- | ---: |\n| a | 1 |\n")
    assert "torch 2.13.0" in text


@pytest.mark.parametrize(
    ("commit", "load", "warnings"),
    [
        ("abc123", 0.5, []),
        ("abc123-dirty", 0.5, ["not committed was measured (abc123-dirty)"]),
        ("abc123", 0.6, ["busy (load 0.6 at the start, 2 cores)"]),
        ("abc123-dirty", 2.0, ["not committed", "busy"]),
    ],
)
def test_results_of_changed_code_or_of_a_busy_machine_are_written_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], commit: str, load: float, warnings: list[str]
) -> None:
    write_results(tmp_path, "speed", replace(MACHINE, commit=commit, load=load), {}, "text")
    assert (tmp_path / "speed.json").exists()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(printed) == len(warnings)
    assert all(said in line for said, line in zip(warnings, printed, strict=True))


def test_a_steps_time_is_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "validation/mean": 0.1},
        {"step": 1, "progress/seconds": 3.0, "response/length/mean": 60.0, "response/trained_ratio": 0.5},
        {"step": 2, "progress/seconds": 4.5, "response/length/mean": 64.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text("{}")
    steps = read_run(tmp_path).steps(sequences=2, epochs=4)
    assert steps == [Step(3.0, 120, 240), Step(1.5, 128, 512)]


def test_stage_seconds_are_medians_without_warm_up_and_without_the_final_checkpoint(tmp_path: Path) -> None:
    seconds = [9.0, 1.0, 3.0, 2.0, 50.0]
    rows = [{"step": 1, "timing/step_seconds": s, "timing/update_seconds": s / 2} for s in seconds]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text("{}")
    assert read_run(tmp_path).stage_seconds(warm_up=1) == {"step": 2.0, "update": 1.0}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all programs there are, an interpreter among them that sees two GPUs; nothing is in /dev."""
    (tmp_path / "dev").mkdir()
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(machines, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(machines, "_commit", lambda: "abc")
    monkeypatch.setattr(
        sys, "executable", str(program(folder / "python", "NVIDIA L4, 22478 MiB\nNVIDIA L4, 22478 MiB"))
    )
    monkeypatch.setenv("PATH", str(folder))
    machines._printed.cache_clear()
    yield folder
    machines._printed.cache_clear()


def program(path: Path, prints: str) -> Path:
    path.write_text(f"#!/bin/sh\nprintf '%b\\n' '{prints}'\n")
    path.chmod(0o755)
    return path


def test_a_gpu_without_nvidia_smi_has_the_name_that_torch_gives_it(tmp_path: Path, programs: Path) -> None:
    assert Hardware.here().accelerator is None
    (tmp_path / "dev" / "nvidia0").touch()
    assert Hardware.here().accelerator == "NVIDIA L4, 22478 MiB; NVIDIA L4, 22478 MiB"
    program(programs / "nvidia-smi", "NVIDIA L4, 23034 MiB")
    machines._printed.cache_clear()
    assert Hardware.here().accelerator == "NVIDIA L4, 23034 MiB"


def test_the_driver_is_among_the_versions(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "DRIVER_FILE", tmp_path / "version")
    assert "driver" not in Hardware.here().versions
    # As open kernel modules write it, and as the others do.
    for kind in ("NVIDIA UNIX Open Kernel Module for x86_64", "NVIDIA UNIX x86_64 Kernel Module"):
        text = f"NVRM version: {kind}  580.159.03  Release Build  (a@b)\nGCC version:  gcc version 12.2.0 (Debian)\n"
        (tmp_path / "version").write_text(text)
        assert Hardware.here().versions["driver"] == "580.159.03"
    program(programs / "nvidia-smi", "581.10\n581.10")
    machines._printed.cache_clear()
    assert Hardware.here().versions["driver"] == "581.10"


def test_what_torch_is_asked_is_a_program_that_runs() -> None:
    asked = subprocess.run([sys.executable, "-c", machines._ASKS_TORCH], capture_output=True, text=True, check=True)
    assert all(re.fullmatch(r".+, \d+ MiB", line) for line in asked.stdout.splitlines())

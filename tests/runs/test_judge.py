"""Runs whose reward a judge gives, over HTTP on the loopback device: one that learns, one whose judge is killed, and
one that is killed itself. The judge is played by the script of examples/llm-judge; everything else is real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_runs import Runner, free_port, metrics_of, wait_for

from rljob_api.overrides import merged
from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "llm-judge"


@contextmanager
def played_judge(port: int) -> Iterator[subprocess.Popen[str]]:
    """The script, as a process of its own; returns when it listens."""
    command = [sys.executable, str(EXAMPLE / "played_judge.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert str(port) in process.stdout.readline()
            yield process
        finally:
            process.kill()


def job_at(port: int, **changes: Any) -> dict[str, Any]:
    """The tiny example with its judge at ``port``; ``changes`` are laid over its spec."""
    job = yaml.safe_load((EXAMPLE / "tiny.yaml").read_text())
    job["spec"]["reward"]["functions"][0]["judge"]["baseUrl"] = f"http://127.0.0.1:{port}/v1"
    return merged(job, {"spec": changes})


def rule(response: str, answer: str) -> float:
    """What the played judge thinks, written once more."""
    right = [index for index in range(min(len(response), len(answer))) if response[index] == answer[index]]
    return round(10 * len(right) / max(len(response), len(answer)), 2) / 10


def rows_of(output: Path) -> list[dict[str, Any]]:
    """All samples that were written."""
    return [
        json.loads(line) for file in sorted((output / "samples").iterdir()) for line in file.read_text().splitlines()
    ]


@pytest.mark.slow(stands_for="test_a_judge_that_is_killed_for_seconds_costs_no_reward")
def test_a_run_learns_from_what_a_judge_says(runner: Runner) -> None:
    assert main(["validate", str(EXAMPLE / "helpful-7b.yaml")]) == 0
    port, output = free_port(), runner.folder / "output"
    with played_judge(port):
        runner.run("run", runner.write(job_at(port)), "--output", output)
    records = metrics_of(output)
    held = [record["validation/held-out/mean@1"] for record in records if "validation/held-out/mean@1" in record]
    # Chance is a tenth of the digits, less where the answer is too long.
    assert held[0] < 0.3
    assert held[-1] >= 0.6
    rows = rows_of(output)
    assert len(rows) > 10
    for row in rows:
        assert row["parts"]["judge"] == pytest.approx(rule(row["response"], row["answer"]))
    # 80 prompts, of which each has few answers: most were known.
    asked, known = (sum(r.get(f"judge/judge/{name}", 0) for r in records) for name in ("requests", "remembered"))
    assert 0 < asked < known
    assert records[-1]["judge/judge/requests_of_run"] >= asked


def test_a_judge_that_is_killed_for_seconds_costs_no_reward(runner: Runner) -> None:
    port, output = free_port(), runner.folder / "output"
    changes: dict[str, Any] = {
        "stop": {"steps": 12, "reward": None},
        "logging": {"samplesEvery": 1, "samplesPerWrite": 128},
        "validation": {"atStart": False},
    }
    job = job_at(port, **changes)
    job["spec"]["reward"]["functions"][0]["judge"]["cache"] = False
    with played_judge(port) as judge:
        run = runner.start("run", runner.write(job), "--output", output)
        wait_for(lambda: len(metrics_of(output)) >= 2, run)
        judge.kill()
        judge.wait()
    time.sleep(2)  # in which the run gets on as far as it can
    before = len(metrics_of(output))
    assert run.poll() is None
    with played_judge(port):
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    records = metrics_of(output)
    assert before < len(records)
    assert sum(record.get("judge/judge/retries", 0) for record in records) > 0
    assert all(record.get("reward/error_ratio", 0) == 0 for record in records)
    assert all(record.get("judge/judge/failures", 0) == 0 for record in records)
    rows = rows_of(output)
    assert len(rows) > 200
    for row in rows:
        assert row["parts"]["judge"] == pytest.approx(rule(row["response"], row["answer"]))


def test_a_run_that_is_killed_asks_no_question_again(runner: Runner) -> None:
    port, output = free_port(), runner.folder / "output"
    changes = {"stop": {"steps": 8, "reward": None}, "checkpoint": {"everySteps": 4}, "validation": {"atStart": False}}
    job = runner.write(job_at(port, **changes))
    record = output / "judges" / "judge.jsonl"

    def lines() -> list[dict[str, Any]]:
        whole = record.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line]

    with played_judge(port):
        run = runner.start("run", job, "--output", output)
        wait_for(lambda: len(metrics_of(output)) >= 6, run)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        answered = {line["key"] for line in lines() if "score" in line}
        first = len(lines())
        runner.run("run", job, "--output", output)
    assert metrics_of(output)[-1]["step"] == 8
    again = {line["asked"] for line in lines()[first:] if "asked" in line}
    assert answered
    assert not answered & again
    scored = Counter(line["key"] for line in lines() if "score" in line)
    assert set(scored.values()) == {1}

"""Validation on an engine that is lent for it, while the other one and the trainer go on."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

from driver_client import TOKEN, Client
from real_runs import Runner, free_port, metrics_of, wait_for
from tiny_job import copy_job


def validated(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in record.items() if name.startswith("validation/") and name != "validation/step"
    }


def test_training_goes_on_and_the_figures_are_those_of_the_step_that_was_due(runner: Runner) -> None:
    job = copy_job(
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 8},
        pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "recompute"},
        # Two at a time, so that validation takes several steps.
        rollout={"engine": "torch", "maxResponseTokens": 3, "replicas": 2, "maxConcurrent": 2},
        trainer={"optimizer": {"learningRate": 1e-2}},
        validation={"atStart": False, "every": 4},
        checkpoint={"everySteps": 4, "keep": 9},
        stop={"steps": 10},
    )
    job["spec"]["data"]["validation"][0] |= {
        "task": {"type": "copy", "digits": 3, "size": 40},
        "samplesPerPrompt": 4,
        "sampling": {"temperature": 1},
    }
    file, output = runner.write(job), runner.folder / "output"
    runner.run("run", file, "--output", output)
    records = metrics_of(output)
    assert [record["step"] for record in records] == list(range(1, 11))
    found = {record["validation/step"]: record for record in records if "validation/step" in record}
    assert 4 in found
    late = found[4]
    assert late["step"] > 4, "training waited"
    # The last weights were validated at the end, when training had nothing left to do.
    assert "validation/step" not in records[-1]
    assert validated(records[-1])
    printed = runner.run("eval", file, "--run", output, "--step", "4", "--json")
    expected = json.loads(printed[printed.index("{") :])
    assert validated(late) == {name: expected[name] for name in validated(late)}
    assert validated(late) != validated(records[-1])
    summary = json.loads((output / "summary.json").read_text())
    history = summary["validation"]["held-out"]["mean@4"]
    assert (history["first"]["step"], history["last"]["step"]) == (4, 10)
    assert max(record["age/max"] for record in records) <= 2


def test_with_one_engine_training_waits_for_validation_and_says_so(runner: Runner) -> None:
    job = copy_job(
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 8},
        pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 2}},
        rollout={"engine": "torch", "maxResponseTokens": 3, "replicas": 1, "maxConcurrent": 1},
        validation={"atStart": False, "every": 1},
        stop={"steps": 100_000},
    )
    job["spec"]["data"]["validation"][0] |= {
        "task": {"type": "copy", "digits": 3, "size": 40},
        "samplesPerPrompt": 8,
        "sampling": {"temperature": 1},
    }
    output, port, token = runner.folder / "output", free_port(), runner.folder / "token"
    token.write_text(f"{TOKEN}\n")
    process = runner.start(
        "run", runner.write(job), "--output", output, "--status-port", str(port), "--token-file", token
    )
    client = Client(port)
    wait_for(client.answers, process)
    told: list[str] = []

    def validates() -> bool:
        status = client.status()
        if "validation" in status.doing:
            told.append(status.doing)
            assert status.waiting is not None
            assert status.waiting.until is not None
        return bool(told)

    wait_for(validates, process)
    assert re.match(
        r"trainer waits for validation: \d+ of 40 prompts scored; .*engine.* \(.* so far, times out in .*\)", told[0]
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)

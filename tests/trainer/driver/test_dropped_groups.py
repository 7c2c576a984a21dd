"""What is said of groups that are not trained: in a step's metrics, and of a run that was killed in its summary."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from real_runs import Runner, copy_job

from rljob_trainer.driver.parts import Parts
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.tally import Tally
from rljob_trainer.telemetry.names import check_all


def metrics(dropped: Tally) -> dict[str, float]:
    activity = SimpleNamespace(take_idle_ratio=lambda: None)
    parts = SimpleNamespace(engines=SimpleNamespace(pool=SimpleNamespace(activity=activity)))
    schedule = SimpleNamespace(open=3, waiting_finished=1)
    pipeline = SimpleNamespace(schedule=schedule, take_dropped=lambda: dropped)
    return Parts.pipeline_metrics(cast(Parts, parts), cast(Pipeline, pipeline))


def test_a_step_says_how_long_and_how_good_the_dropped_were() -> None:
    dropped = Tally()
    dropped.add(samples=2, tokens=10, reward=1.0)
    dropped.add(samples=4, tokens=50, reward=0.25)
    # 60 tokens in 6 responses; scores 2 x 1 and 4 x 0.25 over 6.
    assert metrics(dropped) == {
        "pipeline/open_groups": 3,
        "pipeline/ready_groups": 1,
        "pipeline/dropped_groups": 2,
        "pipeline/dropped/length/mean": 10,
        "pipeline/dropped/reward/mean": 0.5,
    }
    check_all(metrics(dropped))
    assert metrics(Tally()).keys() == {"pipeline/open_groups", "pipeline/ready_groups", "pipeline/dropped_groups"}


def test_a_summary_compares_what_was_dropped_with_what_was_trained(runner: Runner) -> None:
    """Exactly one prompt in three is too long, and prompts whose samples all score the same are filtered."""
    lines = [{"question": "12=" if row % 3 else "12345678=", "answer": "12"} for row in range(30)]
    (runner.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data: dict[str, Any] = {
        "train": {"source": "./rows.jsonl"},
        "prompt": "question",
        "answer": "answer",
        "maxPromptTokens": 4,
        "overlongPrompts": "drop",
    }
    changes: dict[str, Any] = {
        "data": data,
        "algorithm": {"preset": "grpo", "groupFilter": {"dropUniform": True, "maxBatches": 100}},
        "batch": {"groups": 4, "samplesPerPrompt": 4},
        "stop": {"epochs": 2},
        "validation": {},
    }
    output = runner.folder / "output"
    runner.run("run", runner.write(copy_job(**changes)), "--output", output)
    summary = json.loads((output / "summary.json").read_text())
    trained, dropped = summary["trained"], summary["dropped"]["all samples have the same score"]
    assert summary["overlong_prompts"] == 2 * 10
    assert trained["groups"] + dropped["groups"] == 2 * 20
    assert trained["samples"] == 4 * trained["groups"] == summary["samples"]
    assert 0 < dropped["response_length"] <= 3
    assert 0 <= dropped["reward"] <= 1
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert sum(r["pipeline/dropped_groups"] for r in records) <= dropped["groups"]
    assert any("pipeline/dropped/reward/mean" in r for r in records)

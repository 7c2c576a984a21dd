"""What a summary says of groups that were not trained."""

from __future__ import annotations

import json
from typing import Any

from real_runs import Runner
from tiny_job import copy_job


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

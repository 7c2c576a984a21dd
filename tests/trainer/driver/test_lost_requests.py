"""An engine that dies with requests in hand: the ledger says which prompts were asked again."""

from __future__ import annotations

import json
import sqlite3

import psutil
from real_runs import Runner, copy_job, wait_for


def test_what_a_dead_engine_had_in_hand_is_on_record(runner: Runner) -> None:
    model = {
        "hiddenSize": 256,
        "layers": 8,
        "heads": 4,
        "contextLength": 64,
        "tokenizer": {"characters": "0123456789="},
    }
    job = runner.write(
        copy_job(
            model={"random": model},
            placement="separate",
            batch={"groups": 128, "samplesPerPrompt": 16},
            rollout={"engine": "torch", "maxResponseTokens": 56, "replicas": 2},
            validation={"atStart": False},
            stop={"steps": 1},
        )
    )
    output = runner.folder / "output"
    process = runner.start("run", job, "--output", output)

    def both_busy() -> bool:
        engines = json.loads((output / "status.json").read_text())["pools"]["rollout"].get("engines", [])
        return len(engines) == 2 and all(engine.get("running", 0) for engine in engines)

    wait_for(both_busy, process)
    tree = psutil.Process(process.pid).children(recursive=True)
    next(p for p in tree if any(part.startswith("ray::EngineActor") for part in p.cmdline())).kill()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    with sqlite3.connect(f"file:{output / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        again = ledger.execute("SELECT DISTINCT attempt, reason, state FROM resampled").fetchall()
        asked = {ordinal for (ordinal,) in ledger.execute("SELECT ordinal FROM resampled")}
        ended = ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
    assert again == [(1, "engine lost", "running")]
    assert asked <= set(range(128))
    assert ended == [("trained", 128)]

"""What a step's metrics say of groups that are not trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from rljob_trainer.driver.parts import Parts
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.tally import Tally
from rljob_trainer.telemetry.names import check_all


def metrics(dropped: Tally) -> dict[str, float]:
    activity = SimpleNamespace(take_idle_ratio=lambda: None)
    counting = SimpleNamespace(take_counts=dict)
    engines = SimpleNamespace(pool=SimpleNamespace(activity=activity, homes=counting))
    parts = SimpleNamespace(engines=engines, rollout=counting, rewards=counting)
    schedule = SimpleNamespace(open=3, waiting_finished=1)
    pipeline = SimpleNamespace(schedule=schedule, take_dropped=lambda: dropped, take_late=lambda: 2)
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
        "pipeline/late_groups": 2,
        "pipeline/dropped/length/mean": 10,
        "pipeline/dropped/reward/mean": 0.5,
    }
    check_all(metrics(dropped))
    always = ("open", "ready", "dropped", "late")
    assert metrics(Tally()).keys() == {f"pipeline/{name}_groups" for name in always}

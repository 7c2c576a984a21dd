"""What a call cost: the slowest rank's seconds, the fullest device, all hosts' memory."""

import pytest
import torch

from rljob_trainer.learner.metrics import usage_metrics
from rljob_trainer.learner.usage import Meter, Usage
from rljob_trainer.telemetry.names import check_all


def test_ranks_are_put_together_under_public_names() -> None:
    metrics = usage_metrics(
        [
            Usage({"update_actor": 2.0, "update_critic": 0.5}, 3_000_000_000, 4_000_000_000, 1_000_000_000),
            Usage({"update_actor": 1.0, "update_critic": 0.75}, 2_000_000_000, 5_000_000_000, 500_000_000),
        ]
    )
    assert metrics == {
        "timing/update_actor_seconds": 2.0,
        "timing/update_critic_seconds": 0.75,
        "memory/device_allocated_gigabytes": 3.0,
        "memory/device_reserved_gigabytes": 5.0,
        "memory/host_gigabytes/trainer": 1.5,
    }
    check_all(metrics)


def test_cpus_have_no_device_memory() -> None:
    assert usage_metrics([Usage({}, 0, 0, 10**9)]) == {"memory/host_gigabytes/trainer": 1.0}


def test_a_meter_adds_up_a_stage_and_begins_anew_after_a_reading() -> None:
    meter = Meter(torch.device("cpu"))
    for stage in ("values", "reference", "values"):
        with meter.measure(stage):
            torch.randn(64, 64) @ torch.randn(64, 64)
    usage = meter.read()
    assert list(usage.seconds) == ["values", "reference"]
    assert min(usage.seconds.values()) > 0
    assert usage.host > 10_000_000  # torch alone is larger than that
    assert meter.read().seconds == {}


def test_a_stage_that_fails_is_not_counted() -> None:
    meter = Meter(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="out of luck"), meter.measure("values"):
        raise RuntimeError("out of luck")
    assert meter.read().seconds == {}

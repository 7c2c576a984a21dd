"""Random misbehaving reward functions give right scores or sentences; the record of many more is committed."""

from __future__ import annotations

import json

from benchmarks.malformed import rewards


def test_whatever_a_reward_function_does_no_sample_but_its_own_is_touched() -> None:
    records = rewards.run(80, seed=13)
    assert len(records) == 80
    assert {record["kind"] for record in records} == set(rewards.KINDS)
    assert [record for record in records if record["wrong"]] == []


def test_the_record_of_a_thousand_has_every_kind_and_nothing_wrong() -> None:
    record = json.loads((rewards.HERE / "results" / "rewards.json").read_text())
    assert record["cases"] >= 1000
    assert set(record["outcomes"]) == set(rewards.KINDS)
    assert all(record["outcomes"].values())
    assert record["wrong"] == []

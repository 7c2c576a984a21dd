"""The simulated engine against closed forms, and against a slow simulation that goes from token to token."""

from __future__ import annotations

import random

import pytest

from rljob_trainer.simulation.engine import DecodeSpeed, SimulatedEngine, Work

SPEED = DecodeSpeed(alone=0.5, saturation=4)  # one sequence: 0.625 s a token; two: 0.75; three: 0.875; four: 1


def finish_times(engine: SimulatedEngine, arrivals: list[tuple[float, Work]]) -> dict[int, float]:
    """When each group is handed over; the owner wakes the engine only when it says so, as the rollout does."""
    times: dict[int, float] = {}
    arrivals = list(arrivals)
    while True:
        wake = engine.next_finish()
        if arrivals and (wake is None or arrivals[0][0] <= wake):
            now, work = arrivals.pop(0)
            times.update((done.ordinal, now) for done in engine.advance(now))
            engine.add(work, now)
        elif wake is not None:
            times.update((done.ordinal, wake) for done in engine.advance(wake))
        else:
            return times


def token_by_token(speed: DecodeSpeed, slots: int, arrivals: list[tuple[float, Work]]) -> dict[int, float]:
    """The same by an oracle that knows no progress and no queue but lists: from change to change of who runs."""
    now, waiting, running, left, times = 0.0, [], [], {}, {}
    coming = [(at, work.ordinal, list(work.lengths)) for at, work in arrivals]
    while coming or running or waiting:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        per_token = speed.alone * (1 + len(running) / speed.saturation)
        next_end = now + min((r[1] for r in running), default=float("inf")) * per_token
        next_change = min(next_end, coming[0][0] if coming else float("inf"))
        for entry in running:
            entry[1] -= (next_change - now) / per_token
        now = next_change
        for entry in [r for r in running if r[1] < 1e-9]:
            running.remove(entry)
            left[entry[0]] -= 1
            if not left[entry[0]]:
                times[entry[0]] = now
        while coming and coming[0][0] <= now:
            _, ordinal, lengths = coming.pop(0)
            left[ordinal] = len(lengths)
            waiting += [[ordinal, float(length)] for length in lengths]
    return times


def test_a_sequence_alone_takes_its_tokens() -> None:
    assert finish_times(SimulatedEngine(SPEED, 8), [(2.0, Work(0, [10]))]) == {0: pytest.approx(2 + 10 * 0.625)}


def test_sequences_slow_each_other_down_while_both_run() -> None:
    """Two run for 4 tokens at 0.75 s, then one for 6 tokens at 0.625 s."""
    assert finish_times(SimulatedEngine(SPEED, 8), [(0.0, Work(0, [4, 10]))]) == {
        0: pytest.approx(4 * 0.75 + 6 * 0.625)
    }


def test_what_finds_no_slot_waits_for_one() -> None:
    arrivals = [(0.0, Work(0, [4])), (0.0, Work(1, [6]))]
    assert finish_times(SimulatedEngine(SPEED, 1), arrivals) == {0: pytest.approx(2.5), 1: pytest.approx(6.25)}


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_a_simulation_from_change_to_change(seed: int) -> None:
    rng = random.Random(seed)
    slots, n = rng.choice([1, 3, 8, 100]), rng.choice([1, 2, 5])
    times = sorted(rng.uniform(0, 60) for _ in range(12))
    lengths = [[max(1, round(rng.lognormvariate(2, 1))) for _ in range(n)] for _ in times]
    arrivals = [(at, Work(ordinal, own)) for ordinal, (at, own) in enumerate(zip(times, lengths, strict=True))]
    assert finish_times(SimulatedEngine(SPEED, slots), arrivals) == pytest.approx(
        token_by_token(SPEED, slots, arrivals)
    )


def test_a_group_tells_the_versions_of_its_first_and_last_token() -> None:
    """One slot: the second group starts at 2.5 s, after version 7, although that is known to come only later."""
    engine = SimulatedEngine(SPEED, 1)
    first, second, third = Work(0, [4]), Work(1, [4]), Work(2, [4])
    for work in (first, second, third):
        engine.add(work, 0.0)
    assert engine.next_finish() == pytest.approx(2.5)
    engine.advance(2.0)
    engine.serve(7, 2.0)
    engine.advance(6.0)
    engine.serve(8, 6.0)
    engine.advance(9.0)
    assert [(w.first_version, w.last_version) for w in (first, second, third)] == [(0, 7), (7, 7), (7, 8)]


def test_it_knows_how_busy_it_was() -> None:
    engine = SimulatedEngine(SPEED, 8)
    engine.add(Work(0, [4, 10]), 0.0)
    engine.advance(100.0)
    assert engine.busy_seconds == pytest.approx(4 * 0.75 + 6 * 0.625)
    assert engine.sequence_seconds == pytest.approx(2 * 4 * 0.75 + 6 * 0.625)

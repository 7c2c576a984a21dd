"""Work at once in one process: in order, errors told, threads divided, and not a bit of the result changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cut_for import cut_for
from whole_state import parts

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.cpu.side_by_side import SideBySide
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings


def in_a_new_thread(function: Callable[[], int]) -> int:
    """A thread that has not computed yet begins with the process's number of intra-op threads."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_tasks_run_at_once_and_results_keep_their_order() -> None:
    meeting = threading.Barrier(2, timeout=30)  # broken if one task waited for the other's end

    def task(number: int) -> int:
        meeting.wait()
        return number

    assert SideBySide(allowed=True, cores=2).run([partial(task, 1), partial(task, 2)]) == [1, 2]


@pytest.mark.parametrize(("allowed", "cores"), [(False, 4), (True, 1)])
def test_elsewhere_they_run_in_turn_in_the_callers_thread(allowed: bool, cores: int) -> None:
    seen: list[tuple[int, int]] = []

    def task(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return number

    assert SideBySide(allowed=allowed, cores=cores).run([partial(task, n) for n in range(3)]) == [0, 1, 2]
    assert seen == [(number, threading.get_ident()) for number in range(3)]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = threading.Event()

    def fails() -> None:
        raise ValueError("micro-batch 0")

    def goes_on() -> None:
        ended.wait(0.2)
        ended.set()

    with pytest.raises(ValueError, match="micro-batch 0"):
        SideBySide(allowed=True, cores=2).run([fails, goes_on])
    assert ended.is_set()


@pytest.mark.usefixtures("four_threads")
def test_intra_op_threads_are_divided_and_given_back() -> None:
    cores = SideBySide(allowed=True, cores=2)
    assert cores.run([torch.get_num_threads] * 3) == [2, 2, 2]
    assert torch.get_num_threads() == 4
    assert in_a_new_thread(torch.get_num_threads) == 4


def trained(folder: Path, batch: SequenceBatch) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """State after two steps of PPO on two mini-batches each, and scores after it."""
    settings = LearnerSettings(
        folder,
        actor=OptimizerSettings(learning_rate=3e-3),
        critic=OptimizerSettings(learning_rate=3e-3),
        reference=True,
        micro_batch_tokens=60,
    )
    rank = Fsdp2().start(settings)
    halves = [range(0, 12), range(12, 24)]
    loss = LossSettings(kl_kind="k2", kl_coefficient=0.1, entropy_coefficient=0.01, value_clip=0.2)
    for _ in range(2):
        rank.update(cut_for(batch, halves, ranks=1, token_budget=60).shares[0], loss, UpdateRequest(update_critic=True))
    share = cut_for(batch, halves, ranks=1, token_budget=60).shares[0]
    scores = rank.score(share, ScoreRequest(log_probs=True, entropy=True, reference=True, values=True)).streams
    assert rank.critic is not None
    return parts(rank.actor.state() + rank.critic.state()), scores


def test_side_by_side_changes_no_bit(
    tied_folder: Path, make_batch: Callable[..., SequenceBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        results.append(trained(tied_folder, make_batch()))
    (state, scores), (other_state, other_scores) = results
    assert len(state) > 60
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert set(scores) == {"log_probs", "entropy", "ref_log_probs", "values", "final_values"}
    assert all(np.array_equal(scores[name], other_scores[name]) for name in scores)

"""What a session takes over from a checkpoint of its own run, and what it leaves of another run's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.checkpoints.checkpoint import DRIVER, Checkpoint
from rljob_trainer.driver.session import Session
from rljob_trainer.errors import CheckpointError
from rljob_trainer.record.weights import Published
from rljob_trainer.waits import Waits
from rljob_trainer.weights.manifest import Version

pytestmark = pytest.mark.integrity

OWED = {"reward/mean": 0.5}
STATE = {
    **{"step": 7, "version": 7, "groups": 56, "samples": 112, "tokens": 900, "response_tokens": 400, "seconds": 60.0},
    **{"run": "a run", "model": {}, "feed": {"ordinal": 56}, "training": {}, "open": [], "groups_per_version": 8},
    **{"corpora": {}, "unvalidated": OWED, "weights": {"manifest": "5a" * 32, "dtype": "float32"}},
}


async def nothing(*_: Any, **__: Any) -> int:
    return 0


def session(read: list[str], manifest: str = "5a" * 32, dtype: str = "float32") -> Session:
    pool: Any = SimpleNamespace(published=None)

    async def load(_: str, belongs_to: str) -> None:
        read.append(belongs_to)

    async def restore(reading: Any, _: int, steps: int) -> None:
        await reading()
        pool.published = Version(7, manifest)

    parts: Any = SimpleNamespace(
        job=SimpleNamespace(spec=SimpleNamespace(deadlines=SimpleNamespace(progress_seconds=60))),
        feed=SimpleNamespace(load_state_dict=lambda _: None, state_dict=lambda: STATE["feed"]),
        step=SimpleNamespace(load_state_dict=lambda _, own: None, state_dict=lambda: {}, correcting=False),
        limits=SimpleNamespace(resumed=lambda correcting: None),
        ledger=SimpleNamespace(roll_back=nothing, fresh=False, account=SimpleNamespace()),
        view=SimpleNamespace(message=None),
        corpora={},
        shelf=SimpleNamespace(put=lambda *arrays: arrays),
        rollout=SimpleNamespace(goes_on_from=lambda *_, **__: None),
        model={},
        schedule=SimpleNamespace(groups_per_version=8),
        engines=SimpleNamespace(turns=None, pool=pool),
        dtype=dtype,
        trainer=SimpleNamespace(restore=restore),
        learner=SimpleNamespace(load=load),
        waits=Waits(lambda: 0.0),
    )
    parts.ledger.account.trained = SimpleNamespace(groups=STATE["groups"])
    standing = SimpleNamespace(checkpointed=lambda *_: None)
    return Session(parts, SimpleNamespace(stop=None, end=None, standing=standing))  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False])
def test_a_run_keeps_its_name_and_what_it_owes_and_takes_neither_from_another(tmp_path: Path, own: bool) -> None:
    (tmp_path / DRIVER).write_text(json.dumps(STATE))
    read: list[str] = []
    resumed = session(read)
    asyncio.run(resumed._restore(Checkpoint(7, "somewhere", lambda: tmp_path), own=own))
    assert read == ["run a run, step 7"]
    assert (resumed.totals.step, resumed.totals.samples) == (7, 112)
    now = resumed._settled
    assert (now.run == "a run") == own
    assert now.unvalidated == (OWED if own else None)
    assert now.weights == Published("5a" * 32, "float32")


def test_weights_that_are_not_those_of_the_checkpoint_are_told_with_both_manifests(tmp_path: Path) -> None:
    (tmp_path / DRIVER).write_text(json.dumps(STATE))
    checkpoint = Checkpoint(7, "/runs/a/step-7", lambda: tmp_path)
    with pytest.raises(CheckpointError, match=r"/runs/a/step-7 .* manifest is 0b0b0b0b0b0b, .* is 5a5a5a5a5a5a"):
        asyncio.run(session([], "0b" * 32)._restore(checkpoint, own=True))
    # Another run's, that publishes in another dtype: nothing to compare.
    asyncio.run(session([], "0b" * 32, "bfloat16")._restore(checkpoint, own=False))

